"""`portable-indexer demo`, run as a user runs it: real processes, real traces, and every way to fail."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from portable_indexer.cli import _demo_rank, _demo_report, demo, main
from portable_indexer.steps import Step

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for orphans in /proc")

# Lengths / 128 and two heads: a run is mostly the start of its processes.
SMALL = ("--device", "cpu", "--scale", "128", "--heads", "2", "--timeout", "120")


def _command(*options: str) -> list[str]:
    return [sys.executable, "-m", "portable_indexer", "demo", *options]


def _environment(**more: str) -> dict[str, str]:
    held = {name: value for name, value in os.environ.items() if not name.startswith("PORTABLE_INDEXER_")}
    return {**held, "OMP_NUM_THREADS": "1", **more}


def _demo(*options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        _command(*options), env=_environment(**environment), capture_output=True, text=True, timeout=240
    )


def _report(*options: str, **environment: str) -> dict:
    done = _demo(*options, "--json", **environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def _children(pid: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == pid and fields[0] != "Z":
                found.append(int(entry.name))
    return found


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _all_gone(pids: list[int], seconds: float = 15.0) -> bool:
    deadline = time.monotonic() + seconds
    while any(map(_runs, pids)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return not any(map(_runs, pids))


class _Started:
    """A demo whose first steps are over, with its processes."""

    def __init__(self, *options: str, **environment: str) -> None:
        # Not the group of pytest, and with the interrupt that a shell's background jobs lack.
        self.process = subprocess.Popen(
            _command(*options),
            env=_environment(**environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        self.lines: list[str] = []
        for line in self.process.stdout:
            self.lines.append(line)
            if re.match(r" +1 ", line):
                break
        else:
            pytest.fail(f"no step was run: {self.lines} {self.process.stderr.read()}")
        self.children = _children(self.process.pid)
        self.ranks = [p for p in self.children if b"spawn_main" in Path(f"/proc/{p}/cmdline").read_bytes()]

    def __enter__(self) -> _Started:
        return self

    def __exit__(self, *error: object) -> None:
        for pid in [self.process.pid, *self.children]:
            if _runs(pid):
                os.kill(pid, signal.SIGKILL)
        self.process.communicate()


# Enough small steps that a run lasts until it is ended from outside.
LONG = (*SMALL, "--ranks", "3", "--scale", "16", "--max-batched-tokens", "8", "--steps", "0")


@pytest.fixture
def faulty(tmp_path: Path) -> dict[str, str]:
    """Environment of a registered backend that goes wrong on rank 1 as FAULT says, from its fifth call on."""
    info = tmp_path / "faulty_backend-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: faulty-backend\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[portable_indexer.backends]\nfaulty = faulty_backend:Faulty\n")
    (tmp_path / "faulty_backend.py").write_text(
        textwrap.dedent(
            """
            import os, time
            import torch.distributed as dist
            from portable_indexer.backends.reference import Reference

            class Faulty(Reference):
                name = "faulty"
                calls = 0

                def index_topk(self, q, k, k_scale, weights, ks, ke, topk, out, workspace):
                    super().index_topk(q, k, k_scale, weights, ks, ke, topk, out, workspace)
                    Faulty.calls += 1
                    if dist.get_rank() != 1 or Faulty.calls < 5:
                        return
                    fault = os.environ["FAULT"]
                    if fault == "raise":
                        raise ZeroDivisionError("scoring went wrong")
                    if fault == "leave":
                        os._exit(7)
                    if fault == "hang":
                        time.sleep(600)
                    if fault == "wrong":
                        out[-1, 0] ^= 1
                    if fault == "stray":
                        buffer = out.untyped_storage()
                        buffer[0] ^= 1
                        buffer[len(buffer) - 1] ^= 1
            """
        )
    )
    return {"PYTHONPATH": str(tmp_path), "PORTABLE_INDEXER_BACKEND": "faulty"}


def test_built_in_mix_as_a_table():
    done = _demo(*SMALL, "--ranks", "3", "--scale", "32")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    steps = [line.split() for line in lines if " equal " in line]
    assert [int(fields[0]) for fields in steps] == list(range(len(steps)))
    assert len(steps) > 5
    for fields in steps:
        assert sum(map(int, fields[-3:])) == int(fields[2])
    assert any(int(fields[1]) for fields in steps), "the mix has no decode rows"
    assert f"all {len(steps)} steps are the same bytes, sharded and replicated, on all 3 ranks" in done.stdout


def test_json_holds_what_was_planned():
    report = _report(*SMALL, "--ranks", "2", "--topk", "24", "--compress-ratio", "4", "--max-batched-tokens", "50")
    assert report["ok"] is True
    assert (report["ranks"], report["topk"], report["compress_ratio"], report["scale"]) == (2, 24, 4, 128)
    assert [device["backend"] for device in report["devices"]] == ["reference"] * 2
    assert len(report["steps"]) == min(16, report["steps_in_all"])
    for step in report["steps"]:
        rows = step["prefill_rows"]
        assert sum(step["shard_sizes"]) == rows <= 50
        assert step["exchanged_bytes"] == rows * 24 * 4
        assert step["faults"] == []
        assert step["sharded_ms"] > 0 and step["replicated_ms"] > 0
        assert 0 <= step["imbalance"] < 1 or step["key_row_pairs"] < 2 * 500
    totals = report["totals"]
    assert totals["key_row_pairs"] == sum(step["key_row_pairs"] for step in report["steps"])
    assert totals["mismatched_steps"] == []


TRACES = {"mooncake": "mooncake_conversation_first3000.jsonl", "azure": "azure_llm_code_first4000.csv"}


@pytest.mark.parametrize(
    ("name", "all_ranks"),
    [
        ("mooncake", (1, 3)),
        ("azure", (2, 4)),
        pytest.param("mooncake", (2, 4, 8), marks=pytest.mark.slow),
        pytest.param("azure", (1, 3, 8), marks=pytest.mark.slow),
    ],
)
def test_a_trace_gives_one_answer_whatever_the_ranks_and_the_logits_budget(traces, name, all_ranks):
    scale = {"mooncake": "24", "azure": "12"}[name]
    options = (*SMALL, "--trace", str(traces / TRACES[name]), "--scale", scale, "--limit", "20", "--steps", "4")
    digests = set()
    for ranks, budget in zip(all_ranks, ("1", "512", "3"), strict=False):
        report = _report(*options, "--ranks", str(ranks), PORTABLE_INDEXER_LOGITS_MB=budget)
        assert report["ranks"] == ranks
        assert len(report["steps"]) == 4
        # The replicated answer's logits do not fit 1 MiB, so rows were chunked.
        assert max(step["keys"] * step["prefill_rows"] for step in report["steps"]) > 1 << 18
        digests.add(tuple(step["digest"] for step in report["steps"]))
    assert len(digests) == 1
    assert len(set(*digests)) == 4, "different steps, the same ids"


def test_more_ranks_than_rows():  # P04
    report = _report(*SMALL, "--ranks", "4", "--max-batched-tokens", "3", "--compress-ratio", "9", "--steps", "6")
    assert all(0 in step["shard_sizes"] for step in report["steps"])
    assert report["ok"]


def test_a_wrong_id_on_one_rank_is_a_mismatch(faulty):
    done = _demo(*SMALL, "--ranks", "2", "--json", **faulty, FAULT="wrong")
    assert done.returncode == demo.MISMATCH == 1
    report = json.loads(done.stdout)
    assert report["ok"] is False
    bad = [step["step"] for step in report["steps"] if step["faults"]]
    assert report["totals"]["mismatched_steps"] == bad
    assert len(bad) > 3
    said = " ".join(report["steps"][bad[-1]]["faults"])
    assert re.search(r"rank 0: \d+ rows differ from the replicated answer, the first is row \d+", said)


def test_writes_to_decode_and_padded_rows_are_noticed(faulty):  # P01, P02
    done = _demo(*SMALL, "--ranks", "2", "--scale", "16", "--steps", "4", "--heads", "1", **faulty, FAULT="stray")
    assert done.returncode == demo.MISMATCH
    assert "rank 1: decode rows were written by the sharded call" in done.stdout
    assert "rank 1: padded rows were written by the sharded call" in done.stdout
    assert "DIFFER" in done.stdout
    assert re.search(r"\nMISMATCH in [123] of 4 steps\n", done.stdout)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("raise", r"in step \d+: rank 1 \(pid \d+\) failed: ZeroDivisionError: scoring went wrong"),  # X04
        ("leave", r"in step \d+: rank 1 \(pid \d+\) ended with exit code 7 before its work was done"),
        ("hang", r"nothing was heard for 12 s; behind the others or stuck: .*rank 1 \(pid \d+\)"),
    ],
)
def test_a_rank_that_fails(faulty, fault, message):
    options = (*SMALL, "--ranks", "3", *(("--timeout", "12") if fault == "hang" else ()))
    done = _demo(*options, **faulty, FAULT=fault)
    assert done.returncode == demo.RANK_FAILED
    assert re.search("portable-indexer demo: .*" + message, done.stderr), done.stderr
    assert ("Traceback" in done.stderr) == (fault == "raise")
    assert _all_gone([int(pid) for pid in re.findall(r"\(pid (\d+)\)", done.stderr)])


def test_a_killed_rank():
    with _Started(*LONG) as started:
        assert len(started.ranks) == 3
        os.kill(started.ranks[1], signal.SIGKILL)
        _, stderr = started.process.communicate(timeout=60)
        assert started.process.returncode == demo.RANK_FAILED
        assert re.search(rf"in step \d+: rank 1 \(pid {started.ranks[1]}\) was killed by SIGKILL", stderr), stderr
        assert _all_gone(started.children)


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM), (signal.SIGKILL, -signal.SIGKILL)],
)
def test_an_ended_parent_leaves_no_rank_behind(number, code):
    with _Started(*LONG) as started:
        os.kill(started.process.pid, number)
        started.process.wait(timeout=60)
        assert started.process.returncode == code
        assert _all_gone(started.children)


def test_a_port_in_use(capsys):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        code = main(["demo", *SMALL, "--port", str(port), "--json"])
    said = capsys.readouterr()
    assert code == demo.BAD_INPUT
    assert f"port {port} cannot be opened for the ranks to meet: it is in use" in said.err
    assert json.loads(said.out)["ok"] is False


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (("--topk", "4097"), 2, "--topk must be at most 4096, got 4097"),
        (("--trace", "/nowhere/at/all"), 2, "/nowhere/at/all"),
        (("--ranks", "2", "--backend", "absent", *SMALL), 3, "no backend is called 'absent'"),
    ],
)
def test_bad_options(options, code, message, capsys):
    assert main(["demo", *options]) == code
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--ranks", "0"), "must be 1 or more, got 0"),
        (("--seed", "-1"), "must be 0 or more, got -1"),
        (("--ranks", "many"), "invalid positive value: 'many'"),
        (("--timeout", "0"), "must be above 0, got 0.0"),
        (("--timeout", "nan"), "must be above 0, got nan"),
        (("--port", "65536"), "must be from 0 to 65535, got 65536"),
    ],
)
def test_options_that_do_not_parse(options, message, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["demo", *options])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_a_gpu_that_is_not_there():
    with pytest.raises(ValueError, match="torch sees no GPU here"):
        _setup(0, "--device", "gpu")


def test_a_garbled_trace(tmp_path, capsys):
    path = tmp_path / "trace.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,12,many\n")
    assert main(["demo", "--trace", str(path)]) == demo.BAD_INPUT
    assert f"{path}, line 2: GeneratedTokens must be an integer" in capsys.readouterr().err


def _setup(gpus: int, *options: str) -> demo.Setup:
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    return demo.Setup.of(parser.parse_args(options), gpus)


@pytest.mark.parametrize(
    ("gpus", "options", "ranks", "group", "on_gpus"),
    [
        (0, (), 4, "gloo", 0),
        (8, (), 4, "cpu:gloo,cuda:nccl", 8),
        (8, ("--ranks", "8"), 8, "cpu:gloo,cuda:nccl", 8),
        (2, (), 2, "cpu:gloo,cuda:nccl", 2),
        (1, (), 4, "gloo", 1),
        (1, ("--ranks", "1"), 1, "cpu:gloo,cuda:nccl", 1),
        (2, ("--ranks", "3"), 3, "gloo", 2),
        (8, ("--device", "cpu"), 4, "gloo", 0),
    ],
)
def test_how_ranks_and_gpus_go_together(gpus, options, ranks, group, on_gpus):
    setup = _setup(gpus, *options)
    assert (setup.ranks, setup.meeting["group"], setup.job.gpus) == (ranks, group, on_gpus)
    shared = 0 < on_gpus < ranks
    assert bool(setup.note and "share" in setup.note) == shared
    assert (setup.scale, setup.job.num_heads) == ((1, 64) if on_gpus else (16, 16))


def test_defaults_shrink_with_the_scale_and_given_values_do_not():
    assert _setup(1).max_batched_tokens == 8192
    assert (_setup(0).max_batched_tokens, _setup(0).job.topk) == (512, 128)
    setup = _setup(0, "--max-batched-tokens", "1000", "--topk", "7", "--limit", "3")
    assert (setup.max_batched_tokens, setup.job.topk, setup.requests) == (1000, 7, 3)


def test_padding_leaves_a_tail():
    assert [_demo_rank.padded_rows(Step(0, (), (n,), (n,))) for n in (1, 63, 64, 65)] == [64, 64, 128, 128]


def test_ranks_that_disagree_about_the_replicated_answer():
    job = _setup(0).job
    outcomes = [_demo_rank.Outcome(0, 1.0, 2.0, digest, ()) for digest in ("a", "b")]
    row = _demo_report.Row.of(job, job.steps[0], outcomes)
    assert row.faults == ["the replicated answers of the ranks differ: a, b"]
    assert "DIFFER" in row.line()
