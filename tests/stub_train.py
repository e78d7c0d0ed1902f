"""``python -m tests.stub_train``: what a sweep sees of a training run, without training
or slow imports.

STUB holds JSON that maps names of run folders to what these runs do: complete (the
default), fail (an error for the user), crash (an exception), wait (train until SIGTERM,
then save and stop), stubborn (wait and ignore SIGTERM), die (SIGKILL of itself).
"""

import json
import os
import signal
import sys
import time
from datetime import datetime, timezone
from pathlib import Path


def main():
    run = Path(sys.argv[sys.argv.index("--job.dump_folder") + 1])
    what = json.loads(os.environ.get("STUB", "{}")).get(run.name, "complete")
    (run / "environment").write_text(json.dumps(dict(os.environ)))

    def event(name, step, **details):
        now = datetime.now(timezone.utc).isoformat()
        with open(run / "events.jsonl", "a") as file:
            file.write(
                json.dumps({"time": now, "event": name, "step": step, **details}) + "\n"
            )

    if what == "fail":
        print(
            "a line before it\ntitan-disp: error: the data is not there\na line after it",
            file=sys.stderr,
        )
        sys.exit(2)
    asked = []
    signal.signal(signal.SIGTERM, lambda *_: asked.append("SIGTERM"))
    event("start", 0)
    if what == "crash":
        raise RuntimeError("it broke")
    if what == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    (run / "heartbeat.json").write_text(json.dumps({"step": 1, "time": time.time()}))
    while what == "stubborn" or (what == "wait" and not asked):
        time.sleep(0.02)
    if asked:
        event("stop", 1, reason="SIGTERM")
    else:
        event("complete", 4)  # steps, as in tests/test_sweeps.py


if __name__ == "__main__":
    main()
