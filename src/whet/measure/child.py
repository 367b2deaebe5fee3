"""The process in which steps are measured: it opens a rig, then predicts, prepares and steps as it is asked."""

import contextlib
import importlib
import json
import os
from dataclasses import asdict
from typing import Any

from whet.base.errors import UsageError, WhetError
from whet.measure.batches import BatchRig
from whet.measure.lifeline import questions
from whet.measure.rig import Prepared, ProbeFailedError

MARK = "whet-measure "


def main() -> None:
    """The first line on stdin names what to open; each further one is a question, and gets one answer."""
    # Whatever torch or a driver prints goes to stderr: stdout belongs to the answers.
    answers = os.dup(1)
    os.dup2(2, 1)

    def say(answer: dict[str, Any]) -> None:
        os.write(answers, (MARK + json.dumps(answer) + "\n").encode())

    asked = questions()
    opening = json.loads(next(asked))
    with contextlib.ExitStack() as closing:
        try:
            rig: BatchRig = closing.enter_context(_open(opening["target"], opening["arguments"]))
        except WhetError as error:
            say({"refused": [error.what, error.got, error.try_], "is_usage": isinstance(error, UsageError)})
            # Without the usual way out: a thread waits for questions, and a driver that was upset may hang there.
            os._exit(0)
        say({"plan": rig.plan.as_json(), "about": dict(rig.about)})
        prepared: dict[int, Prepared] = {}
        for line in asked:
            say(_answer(rig, prepared, json.loads(line)))


def _open(target: str, arguments: dict[str, Any]) -> Any:
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)(arguments)


def _answer(rig: BatchRig, prepared: dict[int, Prepared], question: dict[str, Any]) -> dict[str, Any]:
    settings, number = question.get("settings", {}), question.get("number", -1)
    try:
        match question["do"]:
            case "batch":
                rig.use_batch(question["size"])
                return {"plan": rig.plan.as_json(), "about": dict(rig.about)}
            case "agree":
                return {"agreement": asdict(rig.agreement(settings, seconds=question["limit"]))}
            case "prepare":
                ready = prepared[number] = rig.prepare(settings, seconds=question["limit"])
                return {
                    "seconds": ready.preparation_seconds,
                    "step": ready.step_seconds,
                    "bytes": ready.peak_bytes(),
                }
            case "step":
                seconds = prepared[number].step(question["index"])
                return {"seconds": seconds, "bytes": prepared[number].peak_bytes()}
            case _:
                prepared.pop(number).close()
                return {}
    except ProbeFailedError as error:
        return {"failed": error.reason, "kind": error.kind}
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}"[:500], "kind": "error"}


if __name__ == "__main__":
    main()
