"""What each kernel is compiled for, and the loaded kernels of one engine."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Protocol

from ..layer.errors import UnsupportedCheckpointError
from ..layer.spec import RoutingMethod
from .compiler import Cubin, Specialisation, compile_kernel, compile_kernels
from .cubins import CubinStore
from .gemm_config import (
    FEW_TILE,
    LORA_TILE,
    MLP_TILES,
    RANK_BLOCKS,
    TOKEN_TILES,
    WIDE_TILES,
    GemmConfig,
    deep_config,
    few_config,
    gemm_config,
    halved_config,
    wide_config,
)
from .kernel import Kernel

EPILOGUE_GATE_UP, EPILOGUE_ACTIVATION, EPILOGUE_DOWN, EPILOGUE_DOWN_FP32, EPILOGUE_BOTH = 0, 1, 2, 3, 4
METHODS = {
    RoutingMethod.SOFTMAX_TOPK: 0,
    RoutingMethod.TOPK_SOFTMAX: 1,
    RoutingMethod.SIGMOID_GROUPED: 2,
}
PER_LANE = (1, 2, 4, 8, 16, 32)
"""Experts a lane that the route kernel is specialised for: up to 1024 experts."""

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how many steps of it are done, and of how many."""


def fetch() -> Specialisation:
    """What brings a small input over the bus."""
    return Specialisation("fetch.cu")


def sort() -> Specialisation:
    """The sort of slot rows by expert and adapter slot."""
    return Specialisation("sort.cu")


def few_sort() -> Specialisation:
    """The sort for a token MLP."""
    return Specialisation("few_sort.cu")


def narrow_sort() -> Specialisation:
    """The sort of up to 256 tokens, by few blocks."""
    return Specialisation("narrow_sort.cu")


def gather() -> Specialisation:
    """The gather of hidden states to their places."""
    return Specialisation("gather.cu")


def wide_sort() -> Specialisation:
    """The sort of more tokens, by clusters of blocks."""
    return Specialisation("wide_sort.cu")


def wide_gather() -> Specialisation:
    """The gather of many tokens' hidden states to their places."""
    return Specialisation("wide_gather.cu")


def wide_gather_shrink(tile: int) -> Specialisation:
    """The gather into token tiles of ``tile`` and, of what it gathers, the shrink of gate and up."""
    return Specialisation("wide_gather_shrink.cu", {"MAX_N": tile})


def grouped_gemm(config: GemmConfig, epilogue: int, *, lora: bool) -> Specialisation:
    """A grouped GEMM of one tile configuration and epilogue; ``lora`` where it adds the delta itself."""
    return Specialisation(
        "grouped_gemm.cu",
        {
            "BLOCK_M": config.block_m,
            "MAX_N": config.max_n,
            "STAGES": config.stages,
            "EPILOGUE": epilogue,
            "LORA": int(lora),
        },
    )


def expert_mlp(config: GemmConfig, *, lora: bool) -> Specialisation:
    """Both products of the experts in one kernel; ``lora`` where it shrinks and adds the delta too."""
    defines = dict(grouped_gemm(config, EPILOGUE_BOTH, lora=lora).defines) | {
        "DIRECT": int(config.direct),
        "HALVES": config.halves,
    }
    return Specialisation("expert_mlp.cu", defines | ({"RANK_BLOCKS": config.rank_blocks} if lora else {}))


def token_mlp(*, lora: bool) -> Specialisation:
    """A few tokens' layer from routing to output; ``lora`` where it shrinks and adds the delta too."""
    return Specialisation("token_mlp.cu", {"LORA": int(lora)})


def wide_gemm(config: GemmConfig, epilogue: int, *, lora: bool) -> Specialisation:
    """A GEMM of many tokens: ``EPILOGUE_ACTIVATION`` or ``EPILOGUE_DOWN``; ``lora`` where it adds the delta."""
    return Specialisation("wide_gemm.cu", grouped_gemm(config, epilogue, lora=lora).defines)


def direct_gemm(config: GemmConfig) -> Specialisation:
    """The gate_up GEMM of few tokens, with activation."""
    return Specialisation("direct_gemm.cu", grouped_gemm(config, EPILOGUE_ACTIVATION, lora=False).defines)


def lora_shrink(projections: int) -> Specialisation:
    """The shrink of gate and up (2 projections) or of down (1)."""
    return Specialisation("lora_shrink.cu", {"PROJECTIONS": projections, "RANK_BLOCKS": RANK_BLOCKS})


def wide_shrink(tile: int) -> Specialisation:
    """The shrink of down for many tokens, in token tiles of ``tile``."""
    return Specialisation("wide_shrink.cu", {"MAX_N": tile})


def lora_expand(projections: int) -> Specialisation:
    """The expand of gate and up (2 projections) or of down (1)."""
    return Specialisation("lora_expand.cu", {"PROJECTIONS": projections})


def activation() -> Specialisation:
    """The activation with a LoRA delta."""
    return Specialisation("activation.cu")


def finalize(lora: bool) -> Specialisation:
    """The weighted sum over a token's choices; ``lora`` where the down LoRA's delta is still apart."""
    return Specialisation("finalize.cu", {"LORA": int(lora)})


def gate(router_fp32: bool, shared_gate: bool) -> Specialisation:
    """Router logits and the shared experts' gate."""
    return Specialisation("gate.cu", {"ROUTER_FP32": int(router_fp32), "SHARED_GATE": int(shared_gate)})


def route(method: RoutingMethod, num_experts: int) -> Specialisation:
    """Top-k selection by one method. Raises ``UnsupportedCheckpointError`` for more experts than a warp holds."""
    per_lane = next((size for size in PER_LANE if size * 32 >= num_experts), None)
    if per_lane is None:
        raise UnsupportedCheckpointError(f"a GPU routes among {32 * PER_LANE[-1]} experts at most, got {num_experts}")
    return Specialisation("route.cu", {"METHOD": METHODS[method], "PER_LANE": per_lane})


def spin() -> Specialisation:
    """The delay that tests put into a branch."""
    return Specialisation("spin.cu")


def stream_read(stage_bytes: int, stages: int) -> Specialisation:
    """The read that benchmarks measure the memory's bandwidth by."""
    return Specialisation("stream_read.cu", {"STAGE_BYTES": stage_bytes, "STAGES": stages})


def for_tiles(tiles: Iterable[int], *, lora: bool) -> list[Specialisation]:
    """The grouped GEMMs of token tiles ``tiles``: those of base batches and, for ``lora``, those of every plan."""
    variants = [(EPILOGUE_ACTIVATION, False), (EPILOGUE_DOWN, False)]
    if lora:
        variants += [(EPILOGUE_ACTIVATION, True), (EPILOGUE_DOWN, True)]
        variants += [(EPILOGUE_GATE_UP, False), (EPILOGUE_DOWN_FP32, False)]
    return [
        grouped_gemm(gemm_config(tile, lora=adds), epilogue, lora=adds) for tile in tiles for epilogue, adds in variants
    ]


def expert_mlps() -> list[Specialisation]:
    """The kernels that hold both products, of sorted tokens and of few tokens as they came."""
    tiles = [(FEW_TILE, True)] + [(tile, False) for tile in MLP_TILES]
    base = [expert_mlp(config, lora=False) for config in (deep_config(), halved_config())]
    return [*base, expert_mlp(gemm_config(LORA_TILE, lora=True), lora=True)] + [
        expert_mlp(config, lora=adds)
        for adds in (False, True)
        for config in (few_config(), *(gemm_config(tile, lora=adds, direct=direct) for tile, direct in tiles))
    ]


def for_many() -> list[Specialisation]:
    """What batches of many tokens are run by: wide GEMMs, and the kernels around them."""
    gemms = [
        wide_gemm(wide_config(tile), epilogue, lora=lora)
        for tile in WIDE_TILES
        for epilogue in (EPILOGUE_ACTIVATION, EPILOGUE_DOWN)
        for lora in (False, True)
    ]
    shrinks = [shrink(tile) for tile in WIDE_TILES for shrink in (wide_gather_shrink, wide_shrink)]
    return [wide_sort(), wide_gather(), *gemms, *shrinks]


def all_specialisations() -> list[Specialisation]:
    """Every kernel that an engine may ever load: what is compiled ahead of time, and what the tests compile."""
    either = (False, True)
    return [
        *[route(method, 32 * per_lane) for method in METHODS for per_lane in PER_LANE],
        *[gate(router_fp32, shared_gate) for router_fp32 in either for shared_gate in either],
        fetch(),
        sort(),
        few_sort(),
        narrow_sort(),
        gather(),
        *[lora_shrink(projections) for projections in (1, 2)],
        *[lora_expand(projections) for projections in (1, 2)],
        *for_tiles(TOKEN_TILES, lora=True),
        *expert_mlps(),
        direct_gemm(gemm_config(FEW_TILE, direct=True)),
        *[token_mlp(lora=lora) for lora in either],
        *for_many(),
        activation(),
        *[finalize(lora) for lora in either],
    ]


def effort(specialisation: Specialisation) -> int:
    """How long a kernel takes to compile beside others, only so well that the longest can be begun with: what holds
    both products and adapters, for many tokens."""
    sizes = {"LORA": 0, "MAX_N": 0, "EPILOGUE": 0} | dict(specialisation.defines)
    both = sizes["EPILOGUE"] == EPILOGUE_BOTH
    return int(sizes["MAX_N"]) * (1 + int(sizes["LORA"])) * (8 if both else 1)


class KernelSource(Protocol):
    """Where launches have their kernels from."""

    def get(self, specialisation: Specialisation, *, dynamic: bool = False) -> Kernel:
        """See ``Kernels.get``."""


class Kernels:
    """The loaded kernels of one device, each loaded at first asking, compiled then unless it is, and never after
    ``seal``."""

    def __init__(self, arch: str, max_shared_bytes: int, store: CubinStore | None = None) -> None:
        self._arch = arch
        self._max_shared_bytes = max_shared_bytes
        self._store = store
        self._compiled: dict[str, Cubin] = {}
        self._loaded: dict[str, Kernel] = {}
        self._sealed = False

    def compile(self, specialisations: Iterable[Specialisation], progress: Progress | None = None) -> None:
        """Compile, side by side, what ``get`` will be asked for; what a store has is only read.

        Raises ``CompileError``.
        """
        longest_first = sorted(specialisations, key=effort, reverse=True)
        told = partial(progress, "compiling kernels") if progress else None
        self._compiled |= compile_kernels(longest_first, self._arch, store=self._store, told=told)

    def get(self, specialisation: Specialisation, *, dynamic: bool = False) -> Kernel:
        """The kernel; ``dynamic`` where it takes dynamic shared memory, of which it may then use all there is.

        Raises ``CompileError``, ``DriverError``, or ``RuntimeError`` once sealed.
        """
        key = str(specialisation)
        if key not in self._loaded:
            if self._sealed:
                raise RuntimeError(f"kernel {key} was asked for after start-up: nothing is compiled or loaded then")
            cubin = self._compiled.pop(key, None) or compile_kernel(
                specialisation.source_file, specialisation.defines, self._arch, store=self._store
            )
            shared_bytes = self._max_shared_bytes - cubin.resources.shared_bytes if dynamic else 0
            self._loaded[key] = Kernel(cubin, shared_bytes)
        return self._loaded[key]

    def seal(self) -> None:
        """From here on ``get`` finds only what is loaded."""
        self._sealed = True

    def close(self) -> None:
        """Unload all."""
        for kernel in self._loaded.values():
            kernel.close()
        self._loaded.clear()
