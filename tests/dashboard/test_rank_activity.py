"""What ranks do now: from heartbeats that real ranks write, with a clock of the test's own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from eventually import wait_until
from vorox.core.run_layout import RunLayout
from vorox.dashboard.pages.rank_activity import HISTORY_READINGS, RankActivity, stalls
from vorox.runtime.heartbeat import Heartbeat, Phase, read_beat

CHILD = """
import sys, time
from pathlib import Path
from vorox.runtime.heartbeat import Heartbeat
with Heartbeat(Path(sys.argv[1]), rank=1, local_rank=1, attempt=2) as heartbeat:
    heartbeat.enter("sync", 4)
    time.sleep(600)
"""


def test_phase_history_idle_time_and_the_slowest_rank(tmp_path: Path) -> None:
    now = 100.0
    activity = RankActivity(lambda: now)
    assert activity.read(tmp_path)["ranks"] == []
    layout = RunLayout(tmp_path)
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(tmp_path)])

    def wait_for(rank: int, phase: Phase, step: int) -> None:
        wait_until(lambda: (b := read_beat(layout.heartbeat(rank))) is not None and (b.phase, b.step) == (phase, step))

    try:
        with Heartbeat(tmp_path, attempt=2) as heartbeat:
            heartbeat.enter("step", 4)
            wait_for(0, "step", 4)
            wait_for(1, "sync", 4)
            found = activity.read(tmp_path)
            assert [(one["rank"], one["step"], one["activity"]) for one in found["ranks"]] == [
                (0, 4, "compute"), (1, 4, "wait"),
            ]  # fmt: skip
            assert found["slowest"] == 0, "rank 1 waits for it"
            now += 30.0
            heartbeat.enter("data", 5)
            wait_for(0, "data", 5)
            child.kill()
            child.wait()
            first, second = activity.read(tmp_path)["ranks"]
            assert (first["history"], first["idle_seconds"]) == (["compute", "data"], 0.0)
            assert (second["history"], second["idle_seconds"]) == (["wait", "dead"], 30.0)
            activity.read(tmp_path)
            assert len(activity.read(tmp_path)["ranks"][0]["history"]) == 2, "another page at the same moment"
            for _ in range(HISTORY_READINGS + 5):
                now += 1.0
                found = activity.read(tmp_path)
            assert len(found["ranks"][0]["history"]) == HISTORY_READINGS
        assert [one["rank"] for one in activity.read(tmp_path)["ranks"]] == [1], "the killed one stays"
    finally:
        child.kill()
        child.wait()
    with Heartbeat(tmp_path, attempt=3):
        assert [one["rank"] for one in activity.read(tmp_path)["ranks"]] == [0], "of the newest attempt"


def test_stalls_stay_with_their_stacks(tmp_path: Path) -> None:
    layout = RunLayout(tmp_path)
    assert stalls(tmp_path) == []
    layout.watchdog.mkdir()
    for attempt in (1, 2):
        record = {"attempt": attempt, "at": "2026-01-01T00:00:00+00:00", "what": f"Rank {attempt}", "where": "step 5",
                  "traceback": "rank 0:\n<stack>", "exit_code": 6}  # fmt: skip
        layout.stall(attempt).write_text(json.dumps(record))
    layout.stall(3).write_text("{")
    assert [(one["attempt"], one["traceback"]) for one in stalls(tmp_path)] == [
        (2, "rank 0:\n<stack>"), (1, "rank 0:\n<stack>"),
    ]  # fmt: skip
