"""Layers that keep a state of fixed size in place of keys and values, declared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class ShortConvSpec:
    """A gated short convolution (LFM2): ``out(c * conv(b * x))`` of the input's b, c and x.

    Attributes:
        n_embd: width of b, c and x, E.
        n_taps: tokens that the convolution covers, the newest included, W.
    """

    n_embd: int
    n_taps: int

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        """What it remembers of a sequence: the convolution's last inputs, oldest first, [W - 1, E]."""
        return ((self.n_taps - 1, self.n_embd),)


@dataclass(frozen=True, slots=True)
class MambaSpec:
    """A selective state space layer (Gu and Dao 2023, https://arxiv.org/abs/2312.00752).

    Attributes:
        n_inner: channels of the state, D.
        n_state: numbers that each keeps, N.
        n_taps: tokens that the convolution before it covers, W.
        n_rank: width that step sizes are projected from.
        norm_eps: epsilon with which step sizes, B and C are divided by their root mean square (FalconMamba); None where
            they are not, or by norms that the file holds.
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
        n_state: numbers that each keeps, N.
        n_taps: tokens that the convolution before it covers, W.
        n_heads: heads, which share a step size and a rate of decay, H.
        n_groups: groups of heads, which share B and C, G.
    """

    n_inner: int
    n_state: int
    n_taps: int
    n_heads: int
    n_groups: int

    @property
    def n_convolved(self) -> int:
        """Channels that the convolution takes: those of the state, then B and C of each group."""
        return self.n_inner + 2 * self.n_groups * self.n_state

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The convolution's last inputs, oldest first, [W - 1, D + 2GN], and the state, [H, D / H, N]."""
        heads = (self.n_heads, self.n_inner // self.n_heads, self.n_state)
        return ((self.n_taps - 1, self.n_convolved), heads)


@dataclass(frozen=True, slots=True)
class Rwkv7Spec:
    """RWKV-7 (Peng et al. 2025, https://arxiv.org/abs/2503.14456): time mixing, and channel mixing behind it.

    Attributes:
        n_embd: embedding width E.
        head_dim: width of a head P, a divisor of E.
        is_first: whether it is the first of its model, whose values later ones mix in.
    """

    n_embd: int
    head_dim: int
    is_first: bool

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The token before, of time mixing [1, E]; the state [H, P, P]; the token before, of channel mixing [1, E]."""
        heads = (self.n_embd // self.head_dim, self.head_dim, self.head_dim)
        return ((1, self.n_embd), heads, (1, self.n_embd))


RecurrentSpec: TypeAlias = ShortConvSpec | MambaSpec | Mamba2Spec | Rwkv7Spec
