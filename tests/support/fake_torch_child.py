"""The child process that queries torch, with a fake torch in front of the real one."""

import json
import os
import sys
from typing import Any

from whet.base.worker import WorkerChannel
from whet.machine.torch_child import describe_torch

FOLDER_VARIABLE = "WHET_TEST_FAKE_TORCH"
MESSAGE_VARIABLE = "WHET_TEST_MESSAGE"


def describe_fake_torch(channel: WorkerChannel, arguments: dict[str, Any]) -> int:
    sys.path.insert(0, os.environ[FOLDER_VARIABLE])
    return describe_torch(channel, arguments)


def send_message(channel: WorkerChannel, _arguments: dict[str, Any]) -> int:
    channel.send(json.loads(os.environ[MESSAGE_VARIABLE]))
    return 0
