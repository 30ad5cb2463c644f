"""Specifications of recurrent layers, which keep a state of fixed size instead of keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class ShortConvSpec:
    """A gated short convolution (LFM2): ``out(c * conv(b * x))`` of the input's b, c and x.

    Attributes:
        n_embd: width of b, c and x, E.
        n_taps: tokens that the convolution covers, including the newest, W.
    """

    n_embd: int
    n_taps: int

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The state of a sequence: the convolution's last inputs, oldest first, [W - 1, E]."""
        return ((self.n_taps - 1, self.n_embd),)


@dataclass(frozen=True, slots=True)
class MambaSpec:
    """A selective state space layer (Gu and Dao 2023, https://arxiv.org/abs/2312.00752).

    Attributes:
        n_inner: channels of the state, D.
        n_state: state numbers per channel, N.
        n_taps: tokens that the convolution covers, W.
        n_rank: width that step sizes are projected from.
        norm_eps: epsilon of the RMS norms without weights on step sizes, B and C (FalconMamba); None if there are none,
            or if the file has norms with weights.
    """

    n_inner: int
    n_state: int
    n_taps: int
    n_rank: int
    norm_eps: float | None = None

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The convolution's last inputs, oldest first, [W - 1, D], and the state, [D, 1, N]."""
        return ((self.n_taps - 1, self.n_inner), (self.n_inner, 1, self.n_state))


@dataclass(frozen=True, slots=True)
class Mamba2Spec:
    """A selective state space layer with heads (Dao and Gu 2024, https://arxiv.org/abs/2405.21060).

    Attributes:
        n_inner: channels of the state, D.
        n_state: state numbers per channel, N.
        n_taps: tokens that the convolution covers, W.
        n_heads: heads H; each has one step size and one decay rate.
        n_groups: groups of heads G; the heads of a group share B and C.
    """

    n_inner: int
    n_state: int
    n_taps: int
    n_heads: int
    n_groups: int

    @property
    def n_convolved(self) -> int:
        """Channels of the convolution's input: the state's channels, then B and C of each group."""
        return self.n_inner + 2 * self.n_groups * self.n_state

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The convolution's last inputs, oldest first, [W - 1, D + 2GN], and the state, [H, D / H, N]."""
        heads = (self.n_heads, self.n_inner // self.n_heads, self.n_state)
        return ((self.n_taps - 1, self.n_convolved), heads)


@dataclass(frozen=True, slots=True)
class Rwkv7Spec:
    """RWKV-7 (Peng et al. 2025, https://arxiv.org/abs/2503.14456): time mixing, then channel mixing.

    Attributes:
        n_embd: embedding width E.
        head_dim: width of a head P, a divisor of E.
        is_first: whether it is the model's first layer. Later layers mix in the values of the first.
    """

    n_embd: int
    head_dim: int
    is_first: bool

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Previous token of time mixing [1, E], state [H, P, P], previous token of channel mixing [1, E]."""
        heads = (self.n_embd // self.head_dim, self.head_dim, self.head_dim)
        return ((1, self.n_embd), heads, (1, self.n_embd))


RecurrentSpec: TypeAlias = ShortConvSpec | MambaSpec | Mamba2Spec | Rwkv7Spec
