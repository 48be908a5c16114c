"""How many single faults in the forward kernels' PTX the emulator finds, and what finds them.

One synchronising instruction, descriptor, address or byte count of a kernel is changed at a time, drawn by
seed among the instructions that the study's problem executes. The changed kernel runs under the checks, eagerly
and then over three late seeds, until something is found; its output is compared with the unchanged kernel's.

A record belongs to the PTX that it was drawn from (its SHA-256): ``run`` drops records of a kernel that today's
default no longer is.

    python studies/emulator_mutants.py run [--count 100] [--seed 0]   appends to data/emulator_mutants.jsonl, resumes
    python studies/emulator_mutants.py clean [--seeds 20]   the unchanged kernels under late seeds
    python studies/emulator_mutants.py again [--seeds 20]   the survivors under further late seeds
    python studies/emulator_mutants.py summary              table, and data/emulator_mutants.json
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import re
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from fa4tune.emulator.attention import random_inputs, relative_error
from fa4tune.emulator.capture import capture
from fa4tune.emulator.findings import Finding
from fa4tune.emulator.launch import Launch
from fa4tune.emulator.machine import run
from fa4tune.errors import EmulationError
from fa4tune.hardware.gpu import choose_gpu
from fa4tune.kernels.compile import compile_kernel
from fa4tune.kernels.config import default_config
from fa4tune.kernels.kernel_class import KernelClass
from fa4tune.problem import AttentionProblem
from fa4tune.runtime.arguments import forward_caller

DATA = Path(__file__).parent / "data"
LINES = DATA / "emulator_mutants.jsonl"
SUMMARY = DATA / "emulator_mutants.json"

#: Two query tiles a CTA (one CTA, or pair, does all the work) and more key tiles than stages.
KERNELS = {
    "sm_90a": ("b1_hq1_hk1_sq256_sk512_d64_dv64_bf16_full_fwd", 1),
    "sm_100a": ("b1_hq1_hk1_sq1024_sk1024_d128_dv128_bf16_full_fwd", 2),
}
LATE_SEEDS = (1, 2, 3)
READ_ONLY = ("mQ", "mK", "mV")
TIME_LIMIT = 240
"""Seconds of one run after which a mutant counts as hung."""

# -- edits

Edit = Callable[[re.Match[str]], "list[str] | None"]


def _drop(match: re.Match[str]) -> list[str]:
    return [f"// {match[0].strip()}"]


def _twice(match: re.Match[str]) -> list[str]:
    return [match[0], match[0]]


def _number(group: str, delta: int) -> Edit:
    """Add to a literal."""

    def edit(match: re.Match[str]) -> list[str]:
        text, (start, end) = match[0], match.span(group)
        value = int(match[group]) + delta
        return [text[: start - match.start()] + str(value) + text[end - match.start() :]]

    return edit


def _value(group: str, delta: int, operation: str = "add.s32", kind: str = "b32") -> Edit:
    """Add to an operand, through a register of its own."""

    def edit(match: re.Match[str]) -> list[str]:
        text, (start, end) = match[0], match.span(group)
        changed = text[: start - match.start()] + "%mutant" + text[end - match.start() :]
        return [f".reg .{kind} %mutant;", f"{operation} %mutant, {match[group]}, {delta};", changed]

    return edit


def _offset(group: str, delta: int) -> Edit:
    """Add to the literal part of an address."""

    def edit(match: re.Match[str]) -> list[str]:
        text, (start, end) = match[0], match.span(group)
        base, _, offset = match[group].partition("+")
        address = f"{base}+{int(offset or 0) + delta}"
        return [text[: start - match.start()] + address + text[end - match.start() :]]

    return edit


def _always(match: re.Match[str]) -> list[str]:
    return [f"setp.eq.u32 {match['p']}, 0, 0;"]


_ADDRESS = r"\[(?P<a>[^\],]+)\]"
_WAIT = rf"mbarrier\.(?:try|test)_wait\S*\s+(?P<p>%?\w+), {_ADDRESS}, (?P<v>%\w+)[^;]*;"
_ARRIVE = rf"mbarrier\.arrive(?!\.expect)\S*\s+(?:[%\w]+, )?{_ADDRESS}[^;]*;"
_EXPECT = rf"mbarrier\.arrive\.expect_tx\S*\s+(?:[%\w]+, )?{_ADDRESS}, (?P<v>[%\w]+);"
_INIT = rf"mbarrier\.init\S*\s+{_ADDRESS}, (?P<v>[%\w]+);"
_BAR = r"bar\.(?:sync|arrive)\s+(?P<n>[%\w]+)(?:, (?P<c>\d+))?;"
_LOAD = (
    r"cp\.async\.bulk\.tensor\.\S*shared::\w+\.global\S* "
    + _ADDRESS
    + r", \[[^\]]*\], \[(?P<b>[^\]]+)\][^;]*;"
)
_STORE = r"cp\.async\.bulk\.tensor\.\S*global\.shared\S* \[[^\]]*\], " + _ADDRESS + r"[^;]*;"
_COMMIT = rf"tcgen05\.commit\S*\s+{_ADDRESS}[^;]*;"
_TMEM_MMA = (
    r"tcgen05\.mma\.\S* \[(?P<d>[^\]]+)\], (?P<A>%rd\d+|\[[^\]]+\]), (?P<B>%rd\d+), (?P<i>%r\d+),[^;]*;"
)
_WGMMA = r"wgmma\.mma_async\.\S* \{[^}]*\}, (?P<A>%rd\d+|\{[^}]*\}), (?P<B>%rd\d+),[^;]*;"

#: Category, name, what an instruction looks like, and what becomes of it.
EDITS: tuple[tuple[str, str, str, Edit], ...] = (
    ("wait", "mbarrier wait removed", _WAIT, _always),
    ("wait", "mbarrier wait for the other parity", _WAIT, _value("v", 1, "xor.b32")),
    ("stage", "mbarrier wait on the next barrier", _WAIT, _offset("a", 8)),
    ("stage", "mbarrier wait on the barrier before", _WAIT, _offset("a", -8)),
    ("arrival", "arrival removed", _ARRIVE, _drop),
    ("arrival", "arrival twice", _ARRIVE, _twice),
    ("stage", "arrival at the next barrier", _ARRIVE, _offset("a", 8)),
    ("bytes", "expected bytes + 16", _EXPECT, _value("v", 16)),
    ("bytes", "expected bytes - 1024", _EXPECT, _value("v", -1024)),
    ("arrival", "expecting arrival removed", _EXPECT, _drop),
    ("stage", "expecting arrival at the next barrier", _EXPECT, _offset("a", 8)),
    ("arrival", "mbarrier count + 1", _INIT, _value("v", 1)),
    ("arrival", "mbarrier count doubled", _INIT, _value("v", 2, "mul.lo.s32")),
    ("arrival", "mbarrier initialisation removed", _INIT, _drop),
    ("wait", "named barrier removed", _BAR, _drop),
    ("arrival", "named barrier for 32 threads more", r"bar\.(?:sync|arrive)\s+\S+, (?P<c>\d+);", _number("c", 32)),
    ("stage", "named barrier of the next number", _BAR, _value("n", 1)),
    ("wait", "cluster barrier's wait removed", r"barrier\.cluster\.wait;", _drop),
    ("arrival", "cluster barrier's arrival removed", r"barrier\.cluster\.arrive;", _drop),
    ("fence", "proxy fence removed", r"fence\.proxy\.async[^;]*;", _drop),
    ("fence", "mbarrier_init fence removed", r"fence\.mbarrier_init[^;]*;", _drop),
    ("fence", "wgmma.fence removed", r"wgmma\.fence[^;]*;", _drop),
    ("fence", "tcgen05.fence::before removed", r"tcgen05\.fence::before[^;]*;", _drop),
    ("fence", "tcgen05.fence::after removed", r"tcgen05\.fence::after[^;]*;", _drop),
    ("wait", "tcgen05.wait::ld removed", r"tcgen05\.wait::ld[^;]*;", _drop),
    ("wait", "tcgen05.wait::st removed", r"tcgen05\.wait::st[^;]*;", _drop),
    ("wait", "wgmma.wait_group removed", r"wgmma\.wait_group[^;]*;", _drop),
    ("wait", "wgmma.wait_group leaves one more", r"wgmma\.wait_group\S*\s+(?P<c>\d+);", _number("c", 1)),
    ("wait", "bulk wait_group removed", r"cp\.async\.bulk\.wait_group[^;]*;", _drop),
    ("wait", "bulk wait_group leaves one more", r"cp\.async\.bulk\.wait_group\S*\s+(?P<c>\d+);", _number("c", 1)),
    ("commit", "bulk commit_group removed", r"cp\.async\.bulk\.commit_group[^;]*;", _drop),
    ("commit", "wgmma.commit_group removed", r"wgmma\.commit_group[^;]*;", _drop),
    ("commit", "tcgen05.commit removed", _COMMIT, _drop),
    ("commit", "tcgen05.commit twice", _COMMIT, _twice),
    ("stage", "tcgen05.commit to the next barrier", _COMMIT, _offset("a", 8)),
    ("stage", "load to 1 KiB further", _LOAD, _offset("a", 1024)),
    ("stage", "load that signals the next barrier", _LOAD, _offset("b", 8)),
    ("bytes", "load removed", _LOAD, _drop),
    ("stage", "store from 1 KiB further", _STORE, _offset("a", 1024)),
    ("descriptor", "operand A 32 bytes further", _WGMMA.replace(r"|\{[^}]*\}", ""), _value("A", 2, "add.s64", "b64")),
    ("descriptor", "operand B 32 bytes further", _WGMMA, _value("B", 2, "add.s64", "b64")),
    ("descriptor", "operand B of another swizzle", _WGMMA, _value("B", 1 << 62, "xor.b64", "b64")),
    ("descriptor", "operand B 32 bytes further", _TMEM_MMA, _value("B", 2, "add.s64", "b64")),
    ("descriptor", "operand B's stride + 16 bytes", _TMEM_MMA, _value("B", 1 << 32, "add.s64", "b64")),
    ("descriptor", "operand A 32 bytes further", _TMEM_MMA.replace(r"|\[[^\]]+\]", ""),
     _value("A", 2, "add.s64", "b64")),
    ("descriptor", "accumulator a column further", _TMEM_MMA, _offset("d", 1)),
    ("descriptor", "instruction descriptor with N - 32", _TMEM_MMA, _value("i", -(4 << 17))),
    ("stage", "tcgen05.ld a column further", rf"tcgen05\.ld\.\S* \{{[^}}]*\}}, {_ADDRESS};", _offset("a", 1)),
    ("stage", "tcgen05.st a column further", rf"tcgen05\.st\.\S* {_ADDRESS}, \{{[^}}]*\}};", _offset("a", 1)),
    ("commit", "tcgen05.dealloc removed", r"tcgen05\.dealloc[^;]*;", _drop),
    ("commit", "permit kept", r"tcgen05\.relinquish_alloc_permit[^;]*;", _drop),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Mutant:
    """One edit of one line (from 1) of a kernel's PTX."""

    arch: str
    category: str
    edit: str
    line: int
    text: str
    changed: str
    before: str
    after: str


def beside(lines: list[str], number: int, step: int) -> str:
    """The nearest instruction before (``step`` -1) or after line ``number`` (from 1), blanks and comments left out."""
    at = number - 1 + step
    while 0 <= at < len(lines) and (not lines[at].strip() or lines[at].strip().startswith("//")):
        at += step
    return lines[at].strip() if 0 <= at < len(lines) else ""


def mutants(arch: str, ptx: str) -> Iterator[Mutant]:
    """Every edit at every place."""
    lines = ptx.splitlines()
    for number, text in enumerate(lines, 1):
        for category, name, pattern, edit in EDITS:
            match = re.search(pattern, text)
            if match is not None:
                new = edit(match)
                if new is not None:
                    guard = text[: match.start()]
                    changed = " ".join([*new[:-1], guard + new[-1] + text[match.end() :]])
                    if name.endswith("twice"):
                        changed = f"{text} {text}"
                    if name.endswith("removed") and new[-1].startswith("//"):
                        changed = f"// {text}"
                    before, after = beside(lines, number, -1), beside(lines, number, 1)
                    yield Mutant(arch, category, name, number, text.strip(), changed, before, after)


def drawn(arch: str, ptx: str, executed: set[int], count: int, seed: int) -> list[Mutant]:
    """``count`` mutants of executed lines: kinds of edit in turn, places at random."""
    by_edit: dict[str, list[Mutant]] = defaultdict(list)
    for mutant in mutants(arch, ptx):
        if mutant.line in executed:
            by_edit[mutant.edit].append(mutant)
    rng = random.Random(f"{arch}/{seed}")
    for places in by_edit.values():
        rng.shuffle(places)
    order = sorted(by_edit)
    rng.shuffle(order)
    out: list[Mutant] = []
    while len(out) < count and any(by_edit.values()):
        out.extend(by_edit[name].pop() for name in order if by_edit[name])
    return out[:count]


# -- running


class _TimeOutError(Exception):
    pass


@dataclass
class Subject:
    """A kernel with its launch and tensors."""

    arch: str
    ptx: str
    launches: list[Launch]
    out: torch.Tensor
    lse: torch.Tensor
    config: str
    kernel_version: int
    compiler: str

    @property
    def digest(self) -> str:
        """SHA-256 of the PTX."""
        return hashlib.sha256(self.ptx.encode()).hexdigest()

    def run(self, ptx: str, late: int | None, **options: Any) -> tuple[list[Finding], bool]:
        """Findings, and whether every launch completed."""
        self.out.fill_(float("nan"))
        self.lse.fill_(float("nan"))
        findings: list[Finding] = []
        for launch in self.launches:
            result = run(ptx, launch, check=True, late=late, **options)
            findings.extend(result.findings)
            if not result.completed:
                return findings, False
        return findings, True


def subject(arch: str) -> Subject:
    """The default kernel of a study problem, on a GPU so small that each CTA does several tiles."""
    text, sms = KERNELS[arch]
    problem = AttentionProblem.parse(text)
    gpu = choose_gpu(None, arch)
    config = default_config(problem, arch)
    kernel = compile_kernel(KernelClass.from_problem(problem, config, arch))
    q, k, v = random_inputs(problem, 1)
    q *= 8  # maxima grow by more than the rescale threshold, so that the rescaling is executed too
    out = torch.full_like(q, float("nan"))
    lse = torch.full((1, problem.heads, problem.seqlen_q), float("nan"))
    launches: list[Launch] = []
    names = [a.name for a in kernel.signature]

    def host(*args: Any) -> None:
        launches.extend(capture(kernel, args, ptx=kernel.ptx, names=names, read_only=READ_ONLY, sm_count=sms))

    small = replace(gpu, sm_count=sms)
    forward_caller(host, names, sm_count=small.sm_count, window=problem.window)(
        q, k, v, out, lse, problem.head_dim**-0.5
    )
    version = kernel.kernel_class.version
    return Subject(arch, kernel.ptx, launches, out, lse, str(config), version, kernel.dsl_version)


def applied(ptx: str, mutant: Mutant) -> str:
    """The PTX with the edit; line numbers stay."""
    lines = ptx.splitlines()
    lines[mutant.line - 1] = mutant.changed
    return "\n".join(lines) + "\n"


def executed(s: Subject) -> set[int]:
    """The lines that some warp of the unchanged kernel executes."""
    lines: set[int] = set()
    for launch in s.launches:
        result = run(s.ptx, launch, counters=True, backend="plain")
        assert result.counters is not None
        for warp in result.counters.warps:
            lines.update(line for line, n in warp.lines.items() if n)
    return lines


def judge(s: Subject, mutant: Mutant, expected: tuple[torch.Tensor, torch.Tensor]) -> dict[str, Any]:
    """Run a mutant and say what killed it."""
    began = time.perf_counter()
    ptx = applied(s.ptx, mutant)
    record: dict[str, Any] = {
        "arch": mutant.arch, "category": mutant.category, "edit": mutant.edit, "line": mutant.line,
        "text": mutant.text, "changed": mutant.changed, "before": mutant.before, "after": mutant.after,
        "ptx": s.digest, "verdict": "survived", "killed_by": "", "mode": "",
    }  # fmt: skip
    for late in (None, *LATE_SEEDS):
        signal.alarm(TIME_LIMIT)
        try:
            findings, completed = s.run(ptx, late)
        except EmulationError as error:
            record |= {"verdict": "killed", "killed_by": "refused", "message": str(error)}
            break
        except _TimeOutError:
            record |= {"verdict": "hung", "killed_by": ""}
            break
        finally:
            signal.alarm(0)
        kinds = list(dict.fromkeys(f.kind for f in findings))
        mode = "eager" if late is None else f"late {late}"
        if findings:
            first = findings[0]
            record |= {
                "verdict": "killed", "killed_by": kinds[0], "kinds": kinds, "mode": mode,
                "completed": completed, "message": str(first)[:400], "found_at": first.line,
            }  # fmt: skip
            break
        differs = not torch.equal(s.out.view(torch.int16), expected[0].view(torch.int16))
        if differs or not torch.equal(s.lse, expected[1]):
            record |= {
                "verdict": "killed", "killed_by": "wrong result", "mode": mode,
                "error": relative_error(s.out, expected[0].double()),
            }  # fmt: skip
            break
    record["seconds"] = round(time.perf_counter() - began, 2)
    return record


def _alarm(number: int, frame: object) -> None:
    raise _TimeOutError


def run_all(count: int, seed: int) -> None:
    """Judge ``count`` mutants a kernel; those in the file already are left out.

    Records of another PTX than today's kernels compile to are dropped from the file first.
    """
    signal.signal(signal.SIGALRM, _alarm)
    subjects = {arch: subject(arch) for arch in KERNELS}
    drop_others({arch: s.digest for arch, s in subjects.items()})
    done = {(r["arch"], r["edit"], r["line"]) for r in read_lines()}
    for arch, s in subjects.items():
        findings, completed = s.run(s.ptx, None)
        if findings or not completed:
            raise SystemExit(f"the unchanged {arch} kernel is not clean: {[str(f) for f in findings]}")
        expected = s.out.clone(), s.lse.clone()
        for mutant in drawn(arch, s.ptx, executed(s), count, seed):
            if (arch, mutant.edit, mutant.line) in done:
                continue
            record = judge(s, mutant, expected)
            with LINES.open("a") as file:
                file.write(json.dumps(record) + "\n")
            print(
                f"{arch} {mutant.edit} (line {mutant.line}): {record['verdict']} {record['killed_by']}",
                flush=True,
            )


def clean(seeds: int) -> None:
    """The unchanged kernels must give no finding, eagerly and over late seeds."""
    for arch in KERNELS:
        s = subject(arch)
        for late in (None, *range(seeds)):
            findings, completed = s.run(s.ptx, late)
            print(f"{arch} late={late}: {len(findings)} findings, completed {completed}", flush=True)
            for finding in findings:
                print(f"  {finding}")


def again(seeds: int) -> None:
    """Survivors that an argument calls equivalent, over further late seeds."""
    for arch in KERNELS:
        s = subject(arch)
        s.run(s.ptx, None)
        expected = s.out.clone(), s.lse.clone()
        for record in read_lines():
            if record["ptx"] != s.digest or record["verdict"] != "survived":
                continue
            mutant = Mutant(**{f.name: record[f.name] for f in fields(Mutant)})
            bad = []
            for late in range(100, 100 + seeds):
                findings, completed = s.run(applied(s.ptx, mutant), late)
                same = torch.equal(s.out.view(torch.int16), expected[0].view(torch.int16))
                if findings or not completed or not same or not torch.equal(s.lse, expected[1]):
                    bad.append(late)
            print(
                f"{arch} {mutant.edit} (line {mutant.line}): {len(bad)} of {seeds} seeds find it", flush=True
            )


def drop_others(digests: dict[str, str]) -> None:
    """Rewrite the records' file without those of a PTX other than these, by architecture."""
    records = read_lines()
    kept = [r for r in records if r["ptx"] == digests[r["arch"]]]
    if len(kept) < len(records):
        LINES.write_text("".join(json.dumps(r) + "\n" for r in kept))


def read_lines() -> list[dict[str, Any]]:
    """What was judged so far."""
    if not LINES.exists():
        return []
    return [json.loads(line) for line in LINES.read_text().splitlines() if line.strip()]


# -- summary


@dataclass(frozen=True, slots=True)
class Argument:
    """Why one mutant that nothing kills computes the same.

    The instruction is named by its text and those of its neighbours, registers included, never by a line number: in
    another kernel the argument must be made again.
    """

    arch: str
    edit: str
    before: str
    text: str
    after: str
    why: str

    def holds(self, mutant: dict[str, Any]) -> bool:
        """Whether a mutant (a record, or a :class:`Mutant` as a dictionary) is the one argued about."""
        return all(mutant[f] == getattr(self, f) for f in ("arch", "edit", "before", "text", "after"))


ARGUMENTS: tuple[Argument, ...] = (
    Argument(
        "sm_90a",
        "named barrier of the next number",
        "$L__BB0_4:",
        "bar.sync \t0;",
        "shr.s32 \t%r86, %r4, 31;",
        "all warps of the CTA meet at barrier 1 instead of 0; its other users come to it only afterwards",
    ),
    Argument(
        "sm_90a",
        "mbarrier wait on the barrier before",
        "LAB_WAIT:",
        "mbarrier.try_wait.parity.shared.b64 P1, [%r1251], %r1334, 10000000;",
        "@P1 bra.uni DONE;",
        "the first K of a tile follows the load of Q, whose wait covers all products with K of the tile before",
    ),
    Argument(
        "sm_90a",
        "mbarrier wait on the next barrier",
        "LAB_WAIT:",
        "mbarrier.try_wait.parity.shared.b64 P1, [%r1279], %r1334, 10000000;",
        "@P1 bra.uni DONE;",
        "the producer of K waits for the other of two stages: for even tiles that is a later release by the same warps, which implies this one's, and the wait of an even tile is also what the next, odd one needs",
    ),
    Argument(
        "sm_90a",
        "named barrier of the next number",
        "mov.b32 \t%r98, 4;",
        "bar.arrive %r98, 256;",
        "$L__BB0_42:",
        "the first turn goes to the second warpgroup instead of the first; the order of turns decides nothing",
    ),
    Argument(
        "sm_90a",
        "mbarrier wait on the next barrier",
        "LAB_WAIT:",
        "mbarrier.try_wait.parity.shared.b64 P1, [%r121], %r1342, 10000000;",
        "@P1 bra.uni DONE;",
        "a warpgroup without rows hands on stages of K that it does not read; those that read them wait themselves, and the turns keep it from releasing a stage twice in a phase",
    ),
    Argument(
        "sm_90a",
        "mbarrier wait removed",
        "LAB_WAIT:",
        "mbarrier.try_wait.parity.shared.b64 P1, [%r126], %r1342, 10000000;",
        "@P1 bra.uni DONE;",
        "a warpgroup without rows hands on stages of V that it does not read; the turns of the warpgroups (named barriers) keep it from releasing tile j before all have released tile j - 2",
    ),
    Argument(
        "sm_90a",
        "wgmma.fence removed",
        "mov.b64 \t%rd58, {%r849, %r850};",
        "wgmma.fence.sync.aligned;",
        "mov.b32 \t%r843, 1;",
        "between the fence at the product before (Q K^T) and this one nothing touches the accumulator or P's registers: the products between write other registers",
    ),
    Argument(
        "sm_100a",
        "permit kept",
        "tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 \t[__dynamic_shmem__0+231776], %r236;",
        "tcgen05.relinquish_alloc_permit.cta_group::2.sync.aligned;",
        "$L__BB0_6:",
        "the permit is for other CTAs of the SM to allocate; this one takes all 512 columns and 226 KiB of shared memory, so that no other fits beside it",
    ),
    Argument(
        "sm_100a",
        "tcgen05.fence::before removed",
        "$L__BB0_43:",
        "tcgen05.fence::before_thread_sync;",
        "bar.warp.sync \t-1;",
        "no access to TMEM lies between the fence ahead of it and this one",
    ),
    Argument(
        "sm_100a",
        "tcgen05.fence::after removed",
        "xor.b32 \t%r3828, %r3821, %r457;",
        "tcgen05.fence::after_thread_sync;",
        "shl.b32 \t%r458, %r3822, 10;",
        "the waits ahead of it are for loads into shared memory; what hands over the columns that the product overwrites has fences of its own",
    ),
    Argument(
        "sm_100a",
        "tcgen05.fence::after removed",
        "$L__BB0_156:",
        "tcgen05.fence::after_thread_sync;",
        "elect.sync \t%r674|%p227, -1;",
        "no wait lies between the fence ahead of it and this one",
    ),
    Argument(
        "sm_100a",
        "mbarrier wait on the barrier before",
        "LAB_WAIT:",
        "mbarrier.try_wait.parity.shared.b64 P1, [%r285], %r3836, 10000000;",
        "@P1 bra.uni DONE;",
        "it waits until the output of the tile before lies in shared memory, which comes after the products that read Q",
    ),
    Argument(
        "sm_100a",
        "mbarrier wait removed",
        "LAB_WAIT:",
        "mbarrier.try_wait.parity.shared.b64 P1, [%r318], %r3835, 10000000;",
        "@P1 bra.uni DONE;",
        "the first K of a tile follows the load of Q, whose wait covers all products with K of the tile before, and those come after every product that read the stage",
    ),
    Argument(
        "sm_100a",
        "mbarrier wait on the barrier before",
        "LAB_WAIT:",
        "mbarrier.try_wait.parity.shared.b64 P1, [%r331], %r3836, 10000000;",
        "@P1 bra.uni DONE;",
        "the barrier of the other half of Q: the commits to both follow each other, after the same products",
    ),
    Argument(
        "sm_100a",
        "mbarrier wait on the next barrier",
        "LAB_WAIT:",
        "mbarrier.try_wait.parity.shared.b64 P1, [%r397], %r398, 10000000;",
        "@P1 bra.uni DONE;",
        "the producer's tail waits for every stage in turn; the release of the next stage implies this one's, as commits complete in order of issue",
    ),
    Argument(
        "sm_100a",
        "mbarrier wait on the next barrier",
        "LAB_WAIT:",
        "mbarrier.try_wait.parity.shared.b64 P1, [%r403], %r404, 10000000;",
        "@P1 bra.uni DONE;",
        "the producer's tail waits for every stage in turn; the release of the next stage implies this one's, as commits complete in order of issue",
    ),
    Argument(
        "sm_100a",
        "mbarrier wait removed",
        "LAB_WAIT:",
        "mbarrier.try_wait.parity.shared.b64 P1, [%r407], %r3836, 10000000;",
        "@P1 bra.uni DONE;",
        "the producer's tail waits for the halves of Q; the commits to both follow each other, and the other is waited for",
    ),
    Argument(
        "sm_100a",
        "mbarrier wait on the barrier before",
        "LAB_WAIT:",
        "mbarrier.try_wait.parity.shared.b64 P1, [%r408], %r3836, 10000000;",
        "@P1 bra.uni DONE;",
        "the last wait of the producer's tail keeps the CTA until a commit arrives; the commits of the last products come after that one, and the correction warps wait for them",
    ),
    Argument(
        "sm_100a",
        "mbarrier wait on the next barrier",
        "LAB_WAIT:",
        "mbarrier.try_wait.parity.shared.b64 P1, [%r408], %r3836, 10000000;",
        "@P1 bra.uni DONE;",
        "the last wait of the producer's tail keeps the CTA until a commit arrives; the commits of the last products come after that one, and the correction warps wait for them",
    ),
)


def argument(record: dict[str, Any]) -> str | None:
    """The argument that a surviving mutant is equivalent, or None: it was missed."""
    return next((a.why for a in ARGUMENTS if a.holds(record)), None)


def summary() -> None:
    """Print the table and write the JSON."""
    subjects = {arch: subject(arch) for arch in KERNELS}
    every = read_lines()
    records = [r for r in every if r["ptx"] == subjects[r["arch"]].digest]
    if len(records) < len(every):
        print(f"{len(every) - len(records)} records of other kernels left out; 'run' drops them")
    for record in records:
        if record["verdict"] == "survived":
            why = argument(record)
            record["verdict"] = "missed" if why is None else "equivalent"
            record["argument"] = why
    table: dict[str, Any] = {}
    for arch, s in subjects.items():
        mine = [r for r in records if r["arch"] == arch]
        verdicts = Counter(r["verdict"] for r in mine)
        killers = Counter(r["killed_by"] for r in mine if r["verdict"] == "killed")
        stuck = [r for r in mine if not r.get("completed", True) and "deadlock" in r.get("kinds", ())]
        table[arch] = {
            "problem": KERNELS[arch][0], "config": s.config, "kernel_version": s.kernel_version,
            "compiler": s.compiler, "ptx": s.digest, "mutants": len(mine), "verdicts": dict(verdicts), "killed_by": dict(killers.most_common()),
            "deadlocks": len(stuck), "hung": verdicts.get("hung", 0),
            "missed_share": verdicts.get("missed", 0) / max(len(mine), 1),
            "by_category": {
                c: dict(Counter(r["verdict"] for r in mine if r["category"] == c))
                for c in sorted({r["category"] for r in mine})
            },
        }  # fmt: skip
        hung = verdicts.get("hung", 0)
        print(
            f"{arch}: {len(mine)} mutants, {dict(verdicts)}; {len(stuck)} deadlocks named, {hung} runs hung"
        )
        for name, n in killers.most_common():
            print(f"  {n:4d} killed by {name}")
        for r in mine:
            if r["verdict"] in ("missed", "hung"):
                print(f"  {r['verdict']}: {r['edit']} at line {r['line']} `{r['text'][:100]}`")
    SUMMARY.write_text(json.dumps({"kernels": table, "mutants": records}, indent=1) + "\n")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("command", choices=("run", "clean", "again", "summary"))
    parser.add_argument("--count", type=int, default=100, help="mutants a kernel")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--seeds", type=int, default=20, help="late seeds of the clean and repeated runs")
    arguments = parser.parse_args()
    if arguments.command == "run":
        run_all(arguments.count, arguments.seed)
    elif arguments.command == "clean":
        clean(arguments.seeds)
    elif arguments.command == "again":
        again(arguments.seeds)
    else:
        summary()


if __name__ == "__main__":
    main()
