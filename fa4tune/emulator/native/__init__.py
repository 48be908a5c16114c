"""Native back-end of the emulator: PTX to LLVM IR on 32-lane vectors, and a C runtime for what has state."""
