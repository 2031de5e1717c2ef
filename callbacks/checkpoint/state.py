"""Checkpoint contents: plain values, copies that a thread can write, and random states."""

import copy
import datetime
import io
import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from pathlib import Path, PurePath
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

# Types that torch.load reads by itself.
PLAIN = (type(None), bool, int, float, str, bytes)
LIBRARIES = ("numpy", "pathlib", "pathlib._local", "collections", "builtins", "datetime")
# Key of a dict that stands for a value of another type.
TYPE = "relight:type"


class Stored(NamedTuple):
    """Conversion of values of one type to plain values and back."""

    type: type
    to_plain: Callable[[Any], Any]
    from_plain: Callable[[Any], Any]


def _array_to_plain(array: Any) -> list[Any]:
    array = np.asarray(array)
    return [array.dtype.str, list(array.shape), array.tobytes()]


def _array_from_plain(parts: list[Any]) -> np.ndarray:
    dtype, shape, content = parts
    return np.frombuffer(content, dtype).reshape(shape).copy()


# What the missing values of a defaultdict are made by, where it can be made again.
FACTORIES: dict[str | None, Any] = {
    kind.__name__: kind for kind in (list, dict, set, int, float, str)
}

STORED = {
    # An empty bytes alone is pickled as a call, which no reader of plain files makes.
    "bytes": Stored(
        bytes, lambda value: value.decode("latin-1"), lambda text: text.encode("latin-1")
    ),
    "Counter": Stored(Counter, dict, Counter),
    "defaultdict": Stored(
        defaultdict,
        lambda value: [value.default_factory and value.default_factory.__name__, dict(value)],
        lambda parts: defaultdict(FACTORIES.get(parts[0]), parts[1]),
    ),
    "numpy.ndarray": Stored(np.ndarray, _array_to_plain, _array_from_plain),
    "numpy.generic": Stored(
        np.generic, _array_to_plain, lambda parts: _array_from_plain(parts)[()]
    ),
    "pathlib.Path": Stored(PurePath, str, Path),
    "deque": Stored(deque, lambda value: [list(value), value.maxlen], lambda parts: deque(*parts)),
    "frozenset": Stored(frozenset, list, frozenset),
    "datetime": Stored(
        datetime.datetime, datetime.datetime.isoformat, datetime.datetime.fromisoformat
    ),
    "timedelta": Stored(
        datetime.timedelta,
        lambda value: [value.days, value.seconds, value.microseconds],
        lambda parts: datetime.timedelta(*parts),
    ),
}


def plain(value: Any, place: str) -> Any:
    """Return a value as tensors and types that `torch.load(weights_only=True)` reads.

    Args:
        place: name of the value, for errors.

    Raises:
        ValueError: some part is of a type that only foreign code could make again.
    """
    try:
        return _plain(value, place)
    except RecursionError:
        raise ValueError(f"a checkpoint cannot hold {place}, which contains itself") from None


def _plain(value: Any, place: str) -> Any:
    if _is_plain(value) or isinstance(value, Tensor):
        return value
    for name, stored in STORED.items():
        if isinstance(value, stored.type) and _is_whole(value):
            return {TYPE: name, "value": _plain(stored.to_plain(value), place)}
    if type(value) in (list, tuple):
        return type(value)(_plain(item, f"{place}.{i}") for i, item in enumerate(value))
    if isinstance(value, dict) and not isinstance(value, defaultdict):
        return _kind(value)(
            (_plain_key(key, place), _plain(item, f"{place}.{key}")) for key, item in value.items()
        )
    _require_readable(value, place)
    return copy.deepcopy(value)


def _is_plain(value: Any) -> bool:
    return type(value) in PLAIN and value != b""


def _is_whole(value: Any) -> bool:
    """Whether the stored form of a value is complete."""
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "OV":
        return False  # records and objects
    if isinstance(value, defaultdict) and value.default_factory is not None:
        return value.default_factory in FACTORIES.values()
    return type(value).__module__ in LIBRARIES  # a subclass holds more than its base


def _kind(value: dict[Any, Any]) -> Any:
    """Return the type that a dict is stored as."""
    return OrderedDict if isinstance(value, OrderedDict) else dict


def _plain_key(key: Any, place: str) -> Any:
    if isinstance(key, np.generic):
        return key.item()  # equal, and of equal hash
    _require_readable(key, f"a key of {place}")
    return key


def _require_readable(value: Any, place: str) -> None:
    if _is_plain(value):
        return
    file = io.BytesIO()
    try:
        torch.save(value, file)
        file.seek(0)
        unread = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    except Exception as error:
        unread = [str(error)]
    if unread:
        kind = type(value)
        raise ValueError(
            f"a checkpoint cannot hold {place}, which is of type {kind.__module__}."
            f"{kind.__qualname__}: only tensors, numbers, text, lists, dicts, numpy arrays, paths, "
            "deques and dates are read back without running code; return one of these from "
            "state_dict() (for an enum its value)"
        )


def original(value: Any) -> Any:
    """Return the value that was passed to `plain`, with its types."""
    if isinstance(value, dict):
        if TYPE in value:
            return STORED[value[TYPE]].from_plain(original(value["value"]))
        return _kind(value)((key, original(item)) for key, item in value.items())
    if type(value) in (list, tuple):
        return type(value)(map(original, value))
    return value


class Copies:
    """Copies of nested plain containers; their tensors lie in buffers that are used again.

    A copy into fresh memory takes three times as long, for its page faults.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple, Tensor] = {}

    def of(self, value: Any, *place: Any) -> Any:
        """Return a copy on the CPU, which overwrites the previous copy."""
        if isinstance(value, Tensor):
            buffer = self._buffers.get(place)
            if buffer is None or (buffer.shape, buffer.dtype) != (value.shape, value.dtype):
                buffer = self._buffers[place] = torch.empty_like(value, device="cpu")
            return buffer.copy_(value)
        if isinstance(value, dict):
            return _kind(value)((key, self.of(item, *place, key)) for key, item in value.items())
        if isinstance(value, list | tuple):
            return type(value)(self.of(item, *place, i) for i, item in enumerate(value))
        return value


def random_states() -> dict[str, Any]:
    """Return the states of the global random generators, as plain types."""
    numpy_state = cast(tuple, np.random.get_state())
    return {
        "python": random.getstate(),
        "numpy": [numpy_state[0], numpy_state[1].tolist(), *numpy_state[2:]],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
    }


def restore_random_states(states: dict[str, Any]) -> None:
    """Restore the result of `random_states`."""
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(states["torch"])
    if len(states["cuda"]) == torch.cuda.device_count() and states["cuda"]:
        torch.cuda.set_rng_state_all(states["cuda"])
