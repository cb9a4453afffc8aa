"""The store that vLLM's servers share, as its scheduler and its workers use it. Needs no vLLM."""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from back_ends import Clock, MemoryStore
from servers import LIMIT, find_mooncake, find_valkey, running, valkey
from support import Device  # noqa: F401

