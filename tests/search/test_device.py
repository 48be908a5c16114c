"""Sensors of the measuring worker, against a stand-in for nvidia-smi."""

from __future__ import annotations

import sys
import time

from fa4tune.search.device import _Sensors


def _command(code: str) -> list[str]:
    return [sys.executable, "-u", "-c", code]


def test_sensors_give_medians_of_the_readings_in_the_window() -> None:
    code = (
        "import time\nfor c in (100, 1700, 1750, 1800):\n  print(f'{c}, 600.5, 700.0, 60'); time.sleep(0.25)"
    )
    sensors = _Sensors(_command(code + "\ntime.sleep(5)"))
    start = time.monotonic()
    time.sleep(1.2)
    found = sensors.since(start)
    assert found["clock_mhz"] in (1725.0, 1750.0)
    assert found["power_limit_watts"] == 700.0
    assert found["temperature_c"] == 60.0


def test_last_reading_stands_in_for_a_window_without_one() -> None:
    sensors = _Sensors(_command("import time; print('1755, 650.0, 700.0, 61', flush=True); time.sleep(5)"))
    assert sensors.since(time.monotonic())["clock_mhz"] == 1755.0


def test_sensors_that_are_missing_or_speak_nonsense_give_nothing(monkeypatch: object) -> None:
    assert _Sensors(["/nonexistent/nvidia-smi"]).since(0.0) == {}
    import fa4tune.search.device as device

    monkeypatch.setattr(device, "SENSOR_START_SECONDS", 0.2)  # type: ignore[attr-defined]
    assert _Sensors(_command("print('[N/A], x')")).since(0.0) == {}
