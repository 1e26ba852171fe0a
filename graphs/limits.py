"""What the kernels cannot do, said before anything is allocated."""

from ..layer.errors import ConfigurationError
from .driver import USE_CPU
from .gemm_config import MOST_SHARED_BYTES
from .geometry import Geometry

MAX_KEYS = 0xFFFF
"""What the sort's 16-bit keys hold: experts times (slots + 1)."""
MAX_TOP_K = 32
"""The route kernel keeps a token's choices in the lanes of one warp."""
MAX_GROUPS = 32
"""It scores groups of experts, a lane each."""
MAX_ROUTED_EXPERTS = 1024


def check_limits(geometry: Geometry, most_tokens: int, max_shared_bytes: int = MOST_SHARED_BYTES) -> None:
    """Raise ``ConfigurationError``, saying what to do, unless ``geometry`` can run up to ``most_tokens`` tokens."""
    limits = (
        ("top_k", geometry.top_k, MAX_TOP_K),
        ("groups of experts", geometry.routing.num_groups, MAX_GROUPS),
        ("experts", geometry.num_experts, MAX_ROUTED_EXPERTS),
    )
    for name, value, most in limits:
        if value > most:
            raise ConfigurationError(
                f"the GPU kernels route at most {most} {name}, and the layer has {value}; {USE_CPU}"
            )
    keys = geometry.experts * (geometry.max_loras + 1)
    if keys >= MAX_KEYS:
        raise ConfigurationError(
            f"{geometry.experts} experts times {geometry.max_loras + 1} (adapter slots and one) should be less than "
            f"{MAX_KEYS}, got {keys}: lower --max-loras"
        )
    needed = geometry.sort_sizes(most_tokens, slots=geometry.max_loras).any_bytes
    if needed > max_shared_bytes:
        raise ConfigurationError(
            f"sorting {most_tokens} tokens among {geometry.experts} experts and {geometry.max_loras} adapter slots "
            f"takes {needed} bytes of shared memory, and the GPU has {max_shared_bytes}: lower --max-loras"
        )
