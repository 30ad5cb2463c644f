"""A context in the child process: it answers calls until its connection ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from slm_core.context.batch import TokenBatch
from slm_core.isolation.channel import Channel
from slm_core.isolation.raised import described
from slm_core.isolation.shared_rows import SharedRows
from slm_core.isolation.values import pack
from slm_core.protocols import Context
from slm_core.types import Pos


def declared(context: Context) -> dict[str, object]:
    """The declarations of a context, as plain values."""
    return {
        "capabilities": sorted(context.capabilities),
        "edit_level": int(context.edit_level),
        "n_ctx": context.n_ctx,
        "n_batch": context.n_batch,
        "n_seq_max": context.n_seq_max,
        "n_free": context.n_free,
        "n_embd": context.n_embd,
    }


class ServedContext:
    """Answers the calls of an ``IsolatedContext``.

    Args:
        context: the backend's context.
        channel: the connection.
        rows: the memory for logits.
    """

    def __init__(self, context: Context, channel: Channel, rows: SharedRows) -> None:
        self._context = context
        self._rows = rows
        self._channel = channel
        self._dumps: dict[int, Iterator[bytes]] = {}
        self._restores: dict[int, tuple[int, Iterator[None]]] = {}  # by number: the sequence, and the steps
        self._last_id = 0
        self._calls: dict[str, Callable[..., tuple[object, list[int]]]] = {
            "length": lambda seq_id: (context.length(seq_id), []),
            "tokens": lambda seq_id: (np.array(context.tokens(seq_id), np.int32), [seq_id]),
            "n_exclusive": lambda seq_id: (context.n_exclusive(seq_id), []),
            "all_exclusive": lambda: (
                np.array([context.n_exclusive(i) for i in range(context.n_seq_max)], np.int32),
                [],
            ),
            "adapters": self._adapters,
            "set_adapters": self._set_adapters,
            "decode": self._decode,
            "decode_top": self._decode_top,
            "embed": self._embed,
            "layer_states": self._layer_states,
            "draft": self._draft,
            "fork": self._fork,
            "fork_cost": lambda src, end: (context.fork_cost(src, end), []),
            "truncate": lambda seq_id, index: (self._nothing(context.truncate(Pos(seq_id, index))), [seq_id]),
            "cut": self._cut,
            "drop": self._drop,
            "clear": self._clear,
            "dump": lambda seq_id: (context.dump(seq_id), []),
            "dump_parts": lambda seq_id, part_bytes: self._begin(context.dump_parts(seq_id, part_bytes)),
            "dump_context": lambda part_bytes: self._begin(context.dump_context(part_bytes)),
            "part": lambda number: (next(self._dumps[number], None), []),
            "restore": lambda seq_id, data: (self._nothing(context.restore(seq_id, data)), [seq_id]),
            "restore_parts": lambda seq_id: (self._nothing(context.restore_parts(seq_id, self._parts())), [seq_id]),
            "restore_steps": self._begin_restore,
            "restore_step": self._restore_step,
            "restore_context": self._restore_context,
        }

    def serve(self) -> None:
        """Answer calls until the context is closed, or the connection ends."""
        try:
            while True:
                call, abandoned, *arguments = self._channel.receive()
                for number in abandoned:
                    self._dumps.pop(number, None)
                    self._restores.pop(number, None)
                if call == "close":
                    self._close()
                    return
                reply = pack(self._answer(call, arguments))
                self._channel.send(reply)
        except (EOFError, OSError):
            self._context.close()
        finally:
            self._channel.close()

    def _answer(self, call: str, arguments: list[Any]) -> list[object]:
        try:
            value, changed = self._calls[call](*arguments)
            lengths = [[seq_id, self._context.length(seq_id)] for seq_id in changed]
        except (EOFError, OSError):
            raise
        except BaseException as error:  # raised again in the parent
            return ["error", described(error)]
        return ["ok", value, self._context.n_free, lengths]

    def _close(self) -> None:
        self._dumps.clear()
        self._restores.clear()
        try:
            self._context.close()
            reply: list[object] = ["ok", None, 0, []]
        except Exception as error:
            reply = ["error", described(error)]
        self._channel.send(pack(reply))

    def _adapters(self, seq_id: int) -> tuple[object, list[int]]:
        scales = self._context.adapters(seq_id)
        return [list(scales), list(scales.values())], []

    def _set_adapters(self, seq_id: int, names: list[str], scales: list[float]) -> tuple[object, list[int]]:
        self._context.set_adapters(seq_id, dict(zip(names, scales, strict=True)))
        return None, []

    def _decode(self, arrays: dict[str, Any]) -> tuple[object, list[int]]:
        rows = self._context.decode(TokenBatch.from_arrays(**arrays))
        return list(rows.shape) if self._rows.write(rows) else rows, _sequences(arrays)

    def _decode_top(self, arrays: dict[str, Any], k: int) -> tuple[object, list[int]]:
        top = self._context.decode_top(TokenBatch.from_arrays(**arrays), k)
        return [top.tokens, top.logits, top.log_totals], _sequences(arrays)

    def _embed(self, arrays: dict[str, Any]) -> tuple[object, list[int]]:
        return self._context.embed(TokenBatch.from_arrays(**arrays)), _sequences(arrays)

    def _layer_states(self, arrays: dict[str, Any], layers: list[int]) -> tuple[object, list[int]]:
        states = self._context.layer_states(TokenBatch.from_arrays(**arrays), layers)
        return np.ascontiguousarray(states), _sequences(arrays)

    def _draft(self, seq_id: int, token: int, n: int, k: int) -> tuple[object, list[int]]:
        top = self._context.draft(seq_id, token, n, k)
        return [top.tokens, top.logits, top.log_totals], []

    def _fork(self, src: int, dst: int, end: int | None) -> tuple[object, list[int]]:
        return self._nothing(self._context.fork(src, dst, end)), [dst]

    def _cut(self, seq_id: int, start: int, end_seq_id: int, end: int) -> tuple[object, list[int]]:
        return self._nothing(self._context.cut(Pos(seq_id, start), Pos(end_seq_id, end))), [seq_id]

    def _drop(self, seq_id: int) -> tuple[object, list[int]]:
        self._context.drop(seq_id)
        return None, [seq_id]

    def _clear(self) -> tuple[object, list[int]]:
        self._context.clear()
        return None, self._all()

    def _restore_context(self) -> tuple[object, list[int]]:
        self._context.restore_context(self._parts())
        return None, self._all()

    def _begin(self, parts: Iterator[bytes]) -> tuple[object, list[int]]:
        self._last_id += 1
        self._dumps[self._last_id] = parts
        return self._last_id, []

    def _begin_restore(self, seq_id: int) -> tuple[object, list[int]]:
        steps = self._context.restore_steps(seq_id, self._parts())
        self._last_id += 1
        self._restores[self._last_id] = seq_id, steps
        return self._last_id, []

    def _restore_step(self, number: int) -> tuple[object, list[int]]:
        """Make a step; the value is whether it was the last."""
        seq_id, steps = self._restores[number]
        return next(steps, _END) is _END, [seq_id]

    def _parts(self) -> Iterator[bytes]:
        """The parts of a dump, which the parent sends one by one."""
        while True:
            self._channel.send(pack(["next"]))
            match self._channel.receive():
                case ["part", part]:
                    yield part
                case ["end"]:
                    return
                case _:
                    raise _Abandoned("the parts of the dump cannot be read")

    def _all(self) -> list[int]:
        return list(range(self._context.n_seq_max))

    @staticmethod
    def _nothing(position: Pos) -> None:
        """No value: the parent derives the position from the length of the sequence."""


_END = object()


class _Abandoned(Exception):
    """The parent's iterator of parts raised an exception, which the parent raises."""


def _sequences(arrays: dict[str, Any]) -> list[int]:
    ids: list[int] = np.unique(arrays["seq_ids"]).tolist()
    return ids
