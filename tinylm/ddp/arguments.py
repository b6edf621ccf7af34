"""What the benchmark can be told."""

from dataclasses import dataclass, field

from tinylm.ddp.collectives import named_algorithm

MATRICES = ("all", "overlap", "native")
_NATIVE_ONLY = ("static_graph", "gradient_as_bucket_view", "find_unused_parameters", "bf16_hook")


def _help(text: str, **more: object) -> dict[str, object]:
    return {"help": text, **more}


@dataclass
class BenchmarkArguments:
    """One configuration, or with `matrix` many, or with `cost_model` none: then tensors are summed."""

    algorithm: str = field(default="builtin", metadata=_help("Which all-reduce sums the gradients."))
    hooks: bool = field(
        default=True, metadata=_help("Exchange during backward, as each gradient is ready; or after it.")
    )
    bucketed: bool = field(default=False, metadata=_help("Exchange flat buckets of gradients during backward."))
    native: bool = field(default=False, metadata=_help("torch's DistributedDataParallel in place of ours."))
    bucket_cap_mb: float = field(default=25.0, metadata=_help("MiB of gradients at which a bucket is full."))
    static_graph: bool = field(default=False, metadata=_help("Native: every step uses the same weights."))
    gradient_as_bucket_view: bool = field(default=False, metadata=_help("Native: gradients lie in the buckets."))
    find_unused_parameters: bool = field(default=False, metadata=_help("Native: look for weights that a step leaves."))
    bf16_hook: bool = field(default=False, metadata=_help("Native: send gradients as bfloat16."))
    matrix: str | None = field(
        default=None,
        metadata=_help(
            "Measure many: all (the algorithms with and without hooks, buckets, native), overlap (what hides the"
            " exchange behind backward, and what does not) or native (its options).",
            nargs="?",
            const="all",
        ),
    )
    cost_model: bool = field(default=False, metadata=_help("Sum tensors of many sizes, and fit and project the cost."))
    latency_us: float = field(
        default=10.0, metadata=_help("Cost model: microseconds a message on the links projected.")
    )
    gbit: float = field(default=100.0, metadata=_help("Cost model: Gbit/s of the links projected."))
    config_name: str = field(
        default="recipes/configs/models/tlm-20m/config.json",
        metadata=_help("A config.json (or its folder, or a Hub id) of any causal language model."),
    )
    batch_size: int = field(default=1, metadata=_help("Rows a rank and step."))
    sequence_length: int = field(default=64, metadata=_help("Tokens of a row."))
    precision: str = field(default="fp32", metadata=_help("fp32, or bf16 (autocast)."))
    steps: int = field(default=20, metadata=_help("Measured steps of each configuration."))
    warmup_steps: int = field(default=5, metadata=_help("Steps before those that are measured, in each round."))
    rounds: int = field(default=4, metadata=_help("Turns that each configuration takes."))
    num_threads: int | None = field(
        default=None, metadata=_help("CPU threads a rank; its share of the cores if unset.")
    )
    use_cpu: bool = field(default=False, metadata=_help("Take the CPU even where there is a GPU."))
    output_file: str | None = field(
        default=None,
        metadata=_help(
            "The CSV of the rows; recipes/results/ddp/<hardware>.csv if unset. The cost model adds -sizes to the name."
        ),
    )

    def __post_init__(self) -> None:
        named_algorithm(self.algorithm)
        if self.matrix not in (None, *MATRICES):
            raise ValueError(f"`matrix` is one of {', '.join(MATRICES)}; it was {self.matrix!r}. Set `--matrix`.")
        if self.precision not in ("fp32", "bf16"):
            raise ValueError(f"`precision` is one of fp32, bf16; it was {self.precision!r}. Set `--precision`.")
        for name in ("batch_size", "sequence_length", "steps", "rounds", "bucket_cap_mb", "latency_us", "gbit"):
            if not getattr(self, name) > 0:
                raise ValueError(f"`{name}` is more than 0; it was {getattr(self, name)}. Set `--{name}`.")
        if self.warmup_steps < 2:
            raise ValueError(
                "The first step makes the optimizer's state and after it native DDP builds its buckets anew, so at"
                f" least 2 steps are not measured; `warmup_steps` is {self.warmup_steps}. Set `--warmup_steps`."
            )
        options = [name for name in _NATIVE_ONLY if getattr(self, name)]
        if options and not self.native:
            raise ValueError(f"`{options[0]}` is an option of native DDP. Set `--native` too.")
        if self.bucketed and self.native:
            raise ValueError("Native DDP has its own buckets: set `--bucketed` or `--native`, not both.")
