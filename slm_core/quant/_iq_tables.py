"""Tables of the IQ types: the levels of four-bit weights, and grids of points for eight or four weights.

The levels and grids are data of ggml (``ggml-common.h``), optimized there for small quantization error, and part of the
file format. Every grid is a set of base-b numbers in ascending order, with the first weight as the lowest digit. So
only the set is stored here: a bit for each possible number, deflated.

ggml is Copyright (c) 2023-2026 The ggml authors, under the MIT License: Permission is hereby granted, free of charge,
to any person obtaining a copy of this software and associated documentation files (the "Software"), to deal in the
Software without restriction, including without limitation the rights to use, copy, modify, merge, publish, distribute,
sublicense, and/or sell copies of the Software, and to permit persons to whom the Software is furnished to do so,
subject to the following conditions: The above copyright notice and this permission notice shall be included in all
copies or substantial portions of the Software. THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS
OR IMPLIED, INCLUDING BUT NOT LIMITED TO THE WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND
NONINFRINGEMENT. IN NO EVENT SHALL THE AUTHORS OR COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER
LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR OTHERWISE, ARISING FROM, OUT OF OR IN CONNECTION WITH THE SOFTWARE
OR THE USE OR OTHER DEALINGS IN THE SOFTWARE.
"""

from __future__ import annotations

import base64
import zlib
from functools import cache

import numpy as np
from numpy.typing import NDArray

IQ4_LEVELS = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)
"""The values of the sixteen codes of IQ4_NL and IQ4_XS."""

IQ1_SHIFT = np.float32(0.125)
"""The shift that IQ1_S and IQ1_M add to or subtract from every weight of a group."""

_IQ2_DIGITS = (8, 25, 43)
_IQ3_XXS_DIGITS = (4, 12, 20, 28, 36, 44, 52, 62)
_IQ3_S_DIGITS = (1, 3, 5, 7, 9, 11, 13, 15)
_IQ1_DIGITS = (-1, 0, 1)

_IQ2_XXS_SET = (
    "eNp1UkuqxDAMk8Hdq5B3Hwd6gG7m/ld5tvPt0BENpLHkSG4/f+XDq1ZouUAAaigwxA64afWEFLXbz718+LoBQVCqn5eSxPakiugoSjpNT6j4xkLlkEak"
    "mrdsKvaVVzQcEqXwcY6jlFtvHa9ytE5NdA8erHrVBlu7ptfiaQ4UTzR7t0+D9Mhgk18I792/MWkMozOpYEUGZTWnjKHk4pUeVVKiD+3yaLJ11MlR6vJs"
    "ezlRkya9ZIuWJs+Vsrxm3zJ8I6bZP4XaFM4G+dvYCpk35szlEWu/YcUTjjHsvjFmaK+qB/ijNp18T/Nl/wr9TfsHxl0VIw=="
)
_IQ2_XS_SET = (
    "eNpdUVuuhTAIHBL6j4nuhyb2vyZ2/1s5PFr13uYcxQLDzDDGuEarR6N7jN6qFMJ9iVYGEbqnDtoZlkIhZkArpNjLfqNsO5NA1bo8JYAFBDtigJd16QK0"
    "VEffvNELHLCRJGDcOCavsBSwVdr3Ft8MzBI/YyQguItPFR+YrVZ4Vig91ZxJmsCQSjFFFqbnQF6FMyWHrikZp8mrtADNKEt5SwnyPsOM0miHp4hoTq0x"
    "X7HOtDckM8rDMHs17BW3p+aFYCbtz+aGBpShy2TzehJuiNPq30xqNOkvCWeIZyg+If0x2t8iIbnQwY7bDyOfokOFu1z32/oVuavEmHEw5Vjp7gI+vAKc"
    "Od2IzVCwoLfAQE4LqnxJ7h+iL1v+XMoqbTQn0uOl7msKr70o/h/N4W2uYLIu79Po/gBOsClJ"
)
_IQ2_S_SET = (
    "eNptUl2KBiEMa0HfK+h9KozvCvb+V9m0OrvfsivD/MXEJGpmy4a1XPAyh9Xc6l4yLVEpeAwza3usaVZxAVJAq6YppM2cJcyaLT2AlIirZCEipW1rQbmt"
    "ui2WsEqz9p4y1US+1ivoUAjWzIBAV1vJISY6EP4lcShBm/Zqq+fEhfbsmg9LaCXMz/QgxS/BAkpmUINcYMOXIGrxTSGOT9yYpnu1Vh9vI1+HvSWP7L7M"
    "thfV6UCzvw4hIPVAsBEstKF0IB8QbMGiP5Er4HetD0G65iMyICUE/BGMWiLJM1qGQ/VNuR2K20hOIF6fghIY3ex4n3JL4FPLO2KGahul7iKdaRzznbS0"
    "y8IuF4+cfyKzQ/OKg5U5ZHDnVx3K2c/KMLms2JRQPAfAKf90WOQ7NiDh02sg9DEwGad3h46fCTlhJKkX/TCtK8h6O/yVGdg1ylcNv5Ur35q+ALm8Vh4="
)
_IQ3_XXS_SET = (
    "eNpNUTEOwjAMPFuxVGUKQ/eKCfGKdGCHH0WdEK9g5Jn4nKZwVdUmPt+dk/llmoBLtrNpgcxqL2xYNlvgEExopeGyAckfwgsFeMBLimx5bgKYWhSzqa+Q"
    "DKIVFeeu4jj5ChqqgRTblm/0xzX6nmKbNXGSntCb6DfRq7kbjTtyjSBQy66/hN+d+2xmUmVXQJrvrAzPhsIYUZoYzGd743mEKqQLVncbdJqUEUMGcbH9"
    "32U9l6yoo4HjpLQ7QEI8ddpIhIPI7z1ctL8Nw3X9CxXSe8Mevst9ZNxL7bIcM/FIRlwNpv2O7piB+AIWuhT2"
)
_IQ3_S_SET = (
    "eNotUcFKw0AQfTPMwmZPuyHiNd1GqPmKrdSDeimC+DtpqdD2luIHiFYE+5PObpzDwLw3897b5Od1br+dOV3PD9EjytdDDGeHykbz6M0QaV9LxaAG9/YT"
    "ySYHhoCvdEYAri/mGWuWp8AVGyzpHKRqSU7VNugiLRq4le4VlqE1Yq3dGW4zf3k5mt4Mt+bQ1aL8CW7De9Q33DihhC2qTuHOswxkQW9ZRC9bTmQJkF/p"
    "39ly7x0ItCLRqIpzONKxhbV3qioBbFrxCRYJJYaDaXOaIKOwHu6czGxUfMaWBiHvTMy8gR+y3Ee5EqiCRzaYgaxCEgSjJN8LS14gtkvdwY4GeG5tDZKU"
    "hXJ3KJUXm9K1+oxqAGx08Jn00gqR5+yipY9QsMLkm0MX/F9rhEnkBcIeC53rpb6Gi0eXc8T8kWhylcm7/IVJG/gDusYnIA=="
)
_IQ1_SET = (
    "eNotUkFLnEcYfneq4XVMZWM/QXJ696ux01kR6y3pZZFdWPRiQvIHPNm0SMk5TT4nu+mX2RRCILQ0l3EwyTgNq/FQtp+wAU9WemjprQdpPYS6HgJeGgzE"
    "zK69zbzwvM/zvM9z7UJUN2zmMlY+c3dJ2/MoKarPR4rKlQsj/YYpSkcBlflAmnTL8wd+EGLg/r4yWAqoQprMRwGup/AHg4kMk6hO1ZlrWMlNbBvS4yDH"
    "nLe4v44oBAQu4QW5hPhj/CVztNu8Z5v+0s3DTralhlpxtvvn0EMWQ0xOZ1wxBDn7t/08pqKF5dKy1wLjXFA4omigUrhaN8g+dpeopuhqkGEJH81HTGLL"
    "qcRUGaGyi5aJnyTWw3sKKyXoKjQwcxkquU8VaCVxZSrqD5bFqXjGyEug4Re6KVy24t3XoDgyEbMaKKgmprMh/TY1srjz17NGY8k9DP8bDV0+K6laKwkt"
    "0dPObza26z+afx0DBtKlQIlpWCsyk6hpnrVb2btDa4oWNRcdCyvT7OzxamfvddFNfte+dXj83+2Xr77J9r54+8nJy/Hj4YN/dJz37aGax003qJon2djB"
    "naRvYWLxyPHVIgTLuO+HgSnJn9Kv6t4DJcDC/eQjUIjwlfZ+iz1ta7PLki+/n/x98yCv8pN+T4z88aQPePcOhLkVUv5iFk/XzEAyCtousOWoHA5VeK56"
    "KXsS/ls+3Eu532C3NjlipmRjSAEtXtdLLe8TIK72d+IClruoAU0joVF3OXopE+BdVMFBb+E+pYqPhgi89XqjwbgMFCrxXKCAtZTFpj0oWqizuc1gefVN"
    "09MVsfizmXqVcBaacH0hFIl5X/Qdu2YsYp6MjkENnabMexVdOwOznuETyH9Y/j/l/lBp9fyIACBw8Yw6loGqDoiDCM7NVbrdcKynMB3DVPAShkmwzLoL"
    "c+8B4wUZaQ=="
)


def _grid(packed_set: str, digits: tuple[int, ...], n_weights: int) -> NDArray[np.float32]:
    """Points [n, n_weights] from the set of their numbers; ``digits`` are the values of a base-b digit."""
    bits = np.frombuffer(zlib.decompress(base64.b64decode(packed_set)), np.uint8)
    numbers = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
    base = len(digits)
    points: NDArray[np.float32] = np.array(digits, np.float32)[numbers[:, None] // base ** np.arange(n_weights) % base]
    return points


@cache
def iq2_xxs_grid() -> NDArray[np.float32]:
    """Magnitudes [256, 8]."""
    return _grid(_IQ2_XXS_SET, _IQ2_DIGITS, 8)


@cache
def iq2_xs_grid() -> NDArray[np.float32]:
    """Magnitudes [512, 8]."""
    return _grid(_IQ2_XS_SET, _IQ2_DIGITS, 8)


@cache
def iq2_s_grid() -> NDArray[np.float32]:
    """Magnitudes [1024, 8]."""
    return _grid(_IQ2_S_SET, _IQ2_DIGITS, 8)


@cache
def iq3_xxs_grid() -> NDArray[np.float32]:
    """Magnitudes [256, 4]."""
    return _grid(_IQ3_XXS_SET, _IQ3_XXS_DIGITS, 4)


@cache
def iq3_s_grid() -> NDArray[np.float32]:
    """Magnitudes [512, 4]."""
    return _grid(_IQ3_S_SET, _IQ3_S_DIGITS, 4)


@cache
def iq1_grid() -> NDArray[np.float32]:
    """Ternary weights [2048, 8]."""
    return _grid(_IQ1_SET, _IQ1_DIGITS, 8)


def signs_of_bytes(packed: NDArray[np.uint8]) -> NDArray[np.float32]:
    """One sign per bit, set for negative, lowest first: [..., m] to [..., m, 8] of +1 and -1."""
    bits = np.unpackbits(packed[..., None], axis=-1, bitorder="little")
    return 1 - 2 * bits.astype(np.float32)


@cache
def signs_of_seven_bits() -> NDArray[np.float32]:
    """Signs [128, 8] of seven stored bits; the eighth sign makes the number of negative weights even."""
    signs = signs_of_bytes(np.arange(128, dtype=np.uint8))
    signs[:, 7] = signs[:, :7].prod(axis=1)
    return signs


def packed_signs(words: NDArray[np.uint32]) -> NDArray[np.float32]:
    """Signs of 32 weights, in the low 28 bits of each word: [N, m] to [N, m, 4, 8]."""
    signs: NDArray[np.float32] = signs_of_seven_bits()[words[..., None] >> np.array([0, 7, 14, 21], np.uint32) & 127]
    return signs
