"""One typed launch for each kernel: which buffers it reads and writes, and how large its grid is."""

from . import kernels
from .arguments import Argument, float32, int32, int64, pointer
from .buffers import RoutingInput
from .gemm_config import GemmConfig, gemm_config, tile_of, wide_config
from .kernel import Kernel, PreparedLaunch
from .lora_launches import DOWN, GATE_UP
from .mlp_launches import MlpLaunches
from .sort_launches import SortLaunches
from .streams import Stream
from .wide_launches import WideLaunches

GATE_TOKENS, GATE_WARPS = 4, 8
ROUTE_WARPS = 4
GATHER_WARPS = 4
FINALIZE_COLUMNS = 128 * 8


class Launches(SortLaunches, MlpLaunches, WideLaunches):
    """Makes the launches of one captured shape. Methods name the kernel; ``stream`` is where it runs."""

    __slots__ = ()

    def gate(self, stream: Stream) -> PreparedLaunch:
        """Router logits of all tokens, unless top-k is given, and the shared experts' gate where there is one."""
        geometry = self.geometry
        rows = geometry.num_experts if self.routing is RoutingInput.GATE else 0
        return self.kernels.get(kernels.gate(geometry.router_fp32, geometry.shared_gated)).prepare(
            grid=(-(-(rows + geometry.shared_gated) // GATE_WARPS), -(-self.num_tokens // GATE_TOKENS), 1),
            block=(GATE_WARPS * 32, 1, 1),
            stream=stream,
            arguments={
                "layer": self.layer,
                "hidden": self.input("hidden_states"),
                "logits": self.buffer("logits"),
                "shared_weights": self.buffer("shared_weights"),
                "num_experts": int32(rows),
                "hidden_stride": int32(geometry.hidden_stride),
            },
            waits=True,
            reads=frozenset({"input"}),
            writes=frozenset({"logits", "shared_weights"}),
        )

    def route(self, stream: Stream) -> PreparedLaunch:
        """Top-k experts and weights from logits, as sent or as the gate made them."""
        geometry = self.geometry
        routing = geometry.routing
        sent = self.routing is RoutingInput.LOGITS
        shared_bytes = ROUTE_WARPS * geometry.num_experts * 4
        return self.kernels.get(kernels.route(routing.method, geometry.num_experts), dynamic=True).prepare(
            grid=(-(-self.num_tokens // ROUTE_WARPS), 1, 1),
            block=(ROUTE_WARPS * 32, 1, 1),
            dynamic_shared_bytes=shared_bytes,
            stream=stream,
            arguments={
                "layer": self.layer,
                "logits": self.input("router_logits") if sent else self.buffer("logits"),
                "topk_ids": self.buffer("routed_ids"),
                "topk_weights": self.buffer("routed_weights"),
                "num_experts": int32(geometry.num_experts),
                "top_k": int32(geometry.top_k),
                "renormalize": int32(routing.renormalize),
                "num_groups": int32(routing.num_groups),
                "topk_groups": int32(routing.topk_groups),
                "has_bias": int32(routing.has_correction_bias),
                "scaling": float32(routing.routed_scaling_factor),
            },
            waits=True,
            reads=frozenset({"input"} if sent else {"input", "logits"}),
            writes=frozenset({"routed_ids", "routed_weights"}),
        )

    def gather(self, stream: Stream) -> PreparedLaunch:
        """Hidden states of all slot rows at their places, in BlockMajorK."""
        return self.kernels.get(kernels.gather()).prepare(
            grid=(-(-self.slot_rows // GATHER_WARPS), 1, 1),
            block=(GATHER_WARPS * 32, 1, 1),
            stream=stream,
            arguments={**self.gathering, "max_rows": int32(self.slot_rows)},
            waits=True,
            holds=True,
            programmatic=True,
            reads=frozenset({"input", "places"}),
            early=frozenset({"input"}),
            writes=frozenset({"tokens"}),
        )

    def gate_up_gemm(self, stream: Stream, *, fused: bool) -> PreparedLaunch:
        """The gate_up GEMM: ``fused`` with delta and activation, else the raw pairs."""
        if fused and self.direct:
            return self._direct_gemm(stream)
        epilogue = kernels.EPILOGUE_ACTIVATION if fused else kernels.EPILOGUE_GATE_UP
        return self._gemm(stream, epilogue, "tokens", "act" if fused else "gate_up", "gate_up_h")

    def down_gemm(self, stream: Stream, *, fused: bool) -> PreparedLaunch:
        """The down GEMM: ``fused`` with its delta, rounded, else the fp32 sums."""
        epilogue = kernels.EPILOGUE_DOWN if fused else kernels.EPILOGUE_DOWN_FP32
        return self._gemm(stream, epilogue, "act", "down" if fused else "down_sums", "down_h")

    def finalize(self, stream: Stream, *, fused: bool) -> PreparedLaunch:
        """The weighted sum over choices; unless ``fused`` it adds the down LoRA's delta first."""
        geometry = self.geometry
        source = "down" if fused else "down_sums"
        early = self.routing_reads | {"places", "shared_weights"}
        lora_reads = set() if fused else {"down_delta"}
        return self.kernels.get(kernels.finalize(not fused)).prepare(
            grid=(self.num_tokens, -(-geometry.output_stride // FINALIZE_COLUMNS), 1),
            block=(128, 1, 1),
            stream=stream,
            arguments={
                "layer": self.layer,
                "places": self.buffer("places"),
                "topk_weights": self.topk_weights,
                "shared_weights": self.shared_weights,
                "token_slots": self.input("token_slots"),
                "down": self.buffer(source),
                "delta": pointer(0) if fused else self.buffer("down_delta"),
                "out": self.buffer("output"),
                "top_k": int32(geometry.top_k),
                "num_shared": int32(geometry.num_shared),
                "hidden_stride": int32(geometry.output_stride),
            },
            waits=True,
            programmatic=fused,
            early=early,
            reads=early | {source} | lora_reads,
            writes=frozenset({"output"}),
        )

    def spin(self, stream: Stream, cycles: int) -> PreparedLaunch:
        """A delay of ``cycles`` clock cycles that touches nothing."""
        return self.kernels.get(kernels.spin()).prepare(
            grid=(1, 1, 1), block=(1, 1, 1), stream=stream, arguments={"cycles": int64(cycles)}, waits=True
        )

    def _direct_gemm(self, stream: Stream) -> PreparedLaunch:
        """The fused gate_up GEMM of few tokens, which reads the input alone until its first tile is half done."""
        config = gemm_config(self.tile, direct=True)
        return self._multiply(
            self.kernels.get(kernels.direct_gemm(config), dynamic=True),
            stream,
            kernels.EPILOGUE_ACTIVATION,
            config,
            config.shared_bytes(staging=True, direct_for=self.geometry),
            arguments={
                "layer": self.layer,
                **self.direct_input,
                "ticket": self.buffer("tickets"),
                "out": self.buffer("act"),
                **self.direct_sizes,
            },
            holds=True,
            early=frozenset({"input"}),
            reads=frozenset({"input"}),
            writes=frozenset({"act", "tickets"}),
        )

    def _gemm(self, stream: Stream, epilogue: int, source: str, target: str, h: str) -> PreparedLaunch:
        down, adds_delta = _is_down(epilogue), self._adds_delta(epilogue)
        if self.wide:
            config = wide_config(self.tile)
            kernel = kernels.wide_gemm(config, epilogue, lora=adds_delta)
        else:
            config = gemm_config(tile_of(self.tile), lora=adds_delta)
            kernel = kernels.grouped_gemm(config, epilogue, lora=adds_delta)
        shared_bytes = config.shared_bytes(
            staging=epilogue == kernels.EPILOGUE_ACTIVATION,
            lora_projections=(DOWN if down else GATE_UP) if adds_delta else 0,
        )
        # With a delta it follows a shrink, which had the tokens itself unless it gathered them; the tickets are older
        # still. Only h is new.
        early = {"input", "tiles", "num_tiles"}
        if adds_delta:
            early |= {"groups"} if self.wide else {"groups", "tickets", source}
        return self._multiply(
            self.kernels.get(kernel, dynamic=True),
            stream,
            epilogue,
            config,
            shared_bytes,
            arguments={
                "layer": self.layer,
                "tokens": self.buffer(source),
                "tiles": self.buffer("tiles"),
                "num_tiles": self.buffer("num_tiles"),
                "groups": self.buffer("groups") if adds_delta else pointer(0),
                "h": self.buffer(h) if adds_delta else pointer(0),
                "ticket": pointer(self.arena.pointer("tickets") + 4 * down),
                "out": self.buffer(target),
            },
            early=frozenset(early),
            reads=frozenset(early | {source} | ({h, "groups"} if adds_delta else set())),
            writes=frozenset({target, "tickets"}),
        )

    def _multiply(
        self,
        kernel: Kernel,
        stream: Stream,
        epilogue: int,
        config: GemmConfig,
        shared_bytes: int,
        *,
        arguments: dict[str, Argument],
        early: frozenset[str],
        reads: frozenset[str],
        writes: frozenset[str],
        holds: bool = False,
    ) -> PreparedLaunch:
        """A GEMM's launch: ``arguments``, and behind them the sizes that all take."""
        geometry = self.geometry
        down, adds_delta = _is_down(epilogue), self._adds_delta(epilogue)
        row_tiles = (geometry.output_stride if down else 2 * geometry.intermediate_stride) // config.block_m
        items = geometry.token_tiles(self.num_tokens, self.tile) * -(-row_tiles // config.cluster)
        return kernel.prepare(
            grid=(min(items, self.sm_count // config.cluster) * config.cluster, 1, 1),
            block=(config.threads(lora=adds_delta), 1, 1),
            dynamic_shared_bytes=shared_bytes,
            stream=stream,
            arguments=arguments
            | {
                "num_experts": int32(geometry.experts),
                "k_blocks": int32(geometry.intermediate_blocks if down else geometry.hidden_blocks),
                "row_tiles": int32(row_tiles),
                "rows": int32(self.rows),
                "max_rank": int32(geometry.max_lora_rank),
                "out_stride": int32(geometry.output_stride if down else geometry.intermediate_stride),
            },
            waits=True,
            programmatic=True,
            holds=holds,
            early=early,
            reads=reads,
            writes=writes,
            label="down_gemm" if down else "gate_up_gemm",
        )

    def _adds_delta(self, epilogue: int) -> bool:
        return self.lora and epilogue in (kernels.EPILOGUE_ACTIVATION, kernels.EPILOGUE_DOWN)


def _is_down(epilogue: int) -> bool:
    return epilogue in (kernels.EPILOGUE_DOWN, kernels.EPILOGUE_DOWN_FP32)
