"""Dropout belongs to training: evaluation, exports and recommendations draw no mask."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from freescale.model import dropout as model_dropout
from freescale.model.dropout import Dropout
from freescale.train.log.events import Progress
from freescale.train.loop import train
from tests.small_run import Recorder, make_run
