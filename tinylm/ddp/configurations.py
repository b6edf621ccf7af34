"""What the benchmark compares: ways to exchange gradients, alone and as whole matrices."""

import logging
from dataclasses import dataclass

from torch import nn

from tinylm.ddp.arguments import BenchmarkArguments
from tinylm.ddp.collectives import ALGORITHMS
from tinylm.ddp.native import NativeDDP
from tinylm.ddp.synchronizer import Synchronizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Configuration:
    """One way to exchange gradients; `algorithm` is one of `ALGORITHMS`, `native`, or `none` for no exchange at all."""

    algorithm: str
    mode: str = ""  # of a Synchronizer; native DDP has options instead
    bucket_cap_mb: float = 25.0
    static_graph: bool = False
    gradient_as_bucket_view: bool = False
    find_unused_parameters: bool = False
    bf16_hook: bool = False

    @property
    def described_mode(self) -> str:
        """The mode as rows and charts name it: `hooks`, `bucketed 25 MB`, `25 MB static_graph`."""
        if self.algorithm == "none":
            return "none"
        options = [
            name
            for name in ("static_graph", "gradient_as_bucket_view", "find_unused_parameters", "bf16_hook")
            if getattr(self, name)
        ]
        if self.algorithm == "native":
            return " ".join([f"{self.bucket_cap_mb:g} MB", *options])
        return f"bucketed {self.bucket_cap_mb:g} MB" if self.mode == "bucketed" else self.mode

    def __str__(self) -> str:
        return self.algorithm if self.algorithm == "none" else f"{self.algorithm}, {self.described_mode}"

    def wrap(self, model: nn.Module) -> Synchronizer | NativeDDP:
        """`model` with this exchange; not for `none`."""
        if self.algorithm != "native":
            return Synchronizer(model, self.algorithm, self.mode, self.bucket_cap_mb)
        return NativeDDP(
            model,
            self.bucket_cap_mb,
            static_graph=self.static_graph,
            gradient_as_bucket_view=self.gradient_as_bucket_view,
            find_unused_parameters=self.find_unused_parameters,
            bf16_hook=self.bf16_hook,
        )


NO_EXCHANGE = Configuration("none")


def configurations(args: BenchmarkArguments, world_size: int) -> list[Configuration]:
    """What the flags ask for; the step without exchange, which the others are compared with, comes first.

    One rank alone exchanges nothing: a matrix of the same step many times over is one row then.
    """
    if args.matrix and world_size == 1:
        logger.warning("There is one rank: nothing is exchanged, and the step without exchange is all there is.")
        return [NO_EXCHANGE]
    if args.matrix == "all":
        return [NO_EXCHANGE, *_all(args.bucket_cap_mb)]
    if args.matrix == "overlap":
        return [NO_EXCHANGE, *_overlap(args.bucket_cap_mb)]
    if args.matrix == "native":
        return [NO_EXCHANGE, *_native(args.bucket_cap_mb)]
    if args.native:
        return [
            NO_EXCHANGE,
            Configuration(
                "native",
                bucket_cap_mb=args.bucket_cap_mb,
                static_graph=args.static_graph,
                gradient_as_bucket_view=args.gradient_as_bucket_view,
                find_unused_parameters=args.find_unused_parameters,
                bf16_hook=args.bf16_hook,
            ),
        ]
    mode = "bucketed" if args.bucketed else "hooks" if args.hooks else "no_hooks"
    return [NO_EXCHANGE, Configuration(args.algorithm, mode, args.bucket_cap_mb)]


def _all(bucket_cap_mb: float) -> list[Configuration]:
    """The algorithms with and without hooks, buckets of the backend's own and of the ring, native DDP without and with
    its options."""
    both = [Configuration(name, mode) for name in ALGORITHMS for mode in ("no_hooks", "hooks")]
    bucketed = [Configuration(name, "bucketed", bucket_cap_mb) for name in ("builtin", "ring")]
    fast = Configuration("native", "", bucket_cap_mb, static_graph=True, gradient_as_bucket_view=True)
    return [*both, *bucketed, Configuration("native", "", bucket_cap_mb), fast]


def _overlap(bucket_cap_mb: float) -> list[Configuration]:
    """What hides the exchange behind backward, and what does not: few, so that each gets many steps."""
    return [
        Configuration("builtin", "no_hooks"),
        Configuration("builtin", "hooks"),
        Configuration("builtin", "bucketed", bucket_cap_mb),
        Configuration("native", "", bucket_cap_mb, static_graph=True, gradient_as_bucket_view=True),
    ]


def _native(bucket_cap_mb: float) -> list[Configuration]:
    """Native DDP's options one by one, then bucket sizes, with our buckets of the same size beside them."""
    one_by_one = [
        Configuration("native", "", bucket_cap_mb, **options)
        for options in (
            {},
            {"static_graph": True},
            {"gradient_as_bucket_view": True},
            {"find_unused_parameters": True},
            {"bf16_hook": True},
        )
    ]
    sizes = [
        configuration
        for cap in (1.0, 5.0, 25.0, 100.0)
        for configuration in (
            Configuration("native", "", cap, static_graph=True, gradient_as_bucket_view=True),
            Configuration("builtin", "bucketed", cap),
        )
    ]
    return [*one_by_one, *sizes]
