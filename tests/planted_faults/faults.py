"""Forty faults, spread over the package: each changes what one line does."""

from typing import Final, NamedTuple


class Fault(NamedTuple):
    """A line of the package, what it becomes, and the tests that should notice."""

    file: str
    line: str
    becomes: str
    tests: str


FAULTS: Final = (
    # The allocator, its replay and the chain's formula.
    Fault(
        "memory/caching_allocator.py",
        "remainder > most_small or size <= most_small",
        "remainder >= 2 * most_small or size <= most_small",
        "memory",
    ),
    Fault(
        "memory/caching_allocator.py",
        "keys = small if size <= most_small else large",
        "keys = small if size < most_small else large",
        "memory",
    ),
    Fault(
        "memory/replay_schedule.py",
        "MICRO_REPEATS = 2 ",
        "MICRO_REPEATS = 1 ",
        "memory",
    ),
    Fault(
        "memory/replay_schedule.py",
        "STEADY_REPEATS = 1 ",
        "STEADY_REPEATS = 0 ",
        "memory",
    ),
    Fault(
        "memory/chain/peak.py",
        "return [first if first >= input_bytes else first + input_bytes, *others]",
        "return [first, *others]",
        "planning memory solvers",
    ),
    Fault(
        "memory/scratch_sizes/indexing.py",
        "FEW_INDICES = 3072 ",
        "FEW_INDICES = 3071 ",
        "memory accuracy/op_level",
    ),
    Fault(
        "memory/scratch_sizes/matmul.py",
        "SMALL_WORKSPACE_BYTES = 8_519_680 ",
        "SMALL_WORKSPACE_BYTES = 8_519_168 ",
        "memory accuracy/op_level",
    ),
    # Time.
    Fault(
        "timing/kernel_times.py",
        'return tf32 or "convolution" in kind',
        'return tf32 or "matmul" in kind',
        "timing",
    ),
    Fault(
        "timing/kernel_times.py",
        "return micro_batch_ns * gradient_accumulation_steps + self.optimizer_ns",
        "return (micro_batch_ns + self.optimizer_ns) * gradient_accumulation_steps",
        "timing",
    ),
    Fault(
        "timing/kernel_times.py",
        "return ends.index(max(ends))",
        "return 0",
        "timing",
    ),
    Fault(
        "tracing/op_costs.py",
        "flops = 4.0 * pairs * width * (0.5 if causal else 1)",
        "flops = 4.0 * pairs * width",
        "tracing/test_op_costs.py",
    ),
    # Solvers.
    Fault(
        "solvers/uniform_segments.py",
        "max(1, math.ceil(math.sqrt(wrappable)))",
        "max(1, math.floor(math.sqrt(wrappable)))",
        "solvers",
    ),
    Fault(
        "solvers/host_limit.py",
        "if sum(row) <= limit_bytes:",
        "if sum(row) <= 2 * limit_bytes:",
        "solvers planning",
    ),
    Fault(
        "solvers/op_knapsack.py",
        "ends = (last,) if whole and last and most else ()",
        "ends = ()",
        "solvers planning",
    ),
    Fault(
        "solvers/batch_size.py",
        "if known is not None and known.lower_ns is None:\n            return False",
        "if known is not None and known.lower_ns is None:\n            return True",
        "solvers planning",
    ),
    Fault(
        "solvers/batch_size_grid.py",
        "_EVERY_EIGHT_UP_TO: Final = 128",
        "_EVERY_EIGHT_UP_TO: Final = 64",
        "solvers",
    ),
    # The search and what is beside a plan: heuristics.
    Fault(
        "planning/search/search.py",
        "SMALL_SLACK: Final = 0.02 ",
        "SMALL_SLACK: Final = 0.2 ",
        "planning api",
    ),
    Fault(
        "planning/search/solver_choice.py",
        "MIN_HOST_GAIN: Final = 0.02 ",
        "MIN_HOST_GAIN: Final = 0.3 ",
        "planning api",
    ),
    Fault(
        "planning/search/search.py",
        "    if count < 1:\n",
        "    if count >= 0:\n",
        "planning api",
    ),
    Fault(
        "planning/search/loss_chunking.py",
        "return first < second - MIN_GAIN * abs(second)",
        "return first < second",
        "planning api",
    ),
    Fault(
        "planning/search/solver_choice.py",
        "return max(0.0, 1 - least_ns / taken_ns) if taken_ns else None",
        "return 0.0 if taken_ns else None",
        "planning api",
    ),
    Fault(
        "planning/search/accumulation.py",
        "_MANY: Final = 4 ",
        "_MANY: Final = 2 ",
        "planning api",
    ),
    Fault(
        "planning/search/lowest_peak.py",
        "FORMULA_ERROR: Final = 0.2",
        "FORMULA_ERROR: Final = 0.0",
        "planning api",
    ),
    Fault(
        "planning/judge.py",
        "MIN_PEAK_SHARE: Final = 0.01 ",
        "MIN_PEAK_SHARE: Final = 9.0 ",
        "planning",
    ),
    Fault(
        "core/budget.py",
        "return reserved_bytes <= self.usable_bytes and (",
        "return reserved_bytes <= 2 * self.usable_bytes and (",
        "planning api",
    ),
    Fault(
        "planning/alternatives/training_changes.py",
        "if fastest.samples_per_s > plan.samples_per_s * (1 + MIN_GAIN):",
        "if fastest.samples_per_s > plan.samples_per_s * (1 - MIN_GAIN):",
        "planning api",
    ),
    Fault(
        "core/budget.py",
        "left = self.total_bytes - self.context_bytes - self.headroom_bytes",
        "left = self.total_bytes - self.context_bytes",
        "core",
    ),
    # Tracing.
    Fault(
        "tracing/recording/batch_scaling.py",
        "else (other - one) // span",
        "else (other - one) // span + 1",
        "tracing",
    ),
    Fault(
        "tracing/recording/steady_state.py",
        "if event > 0 and storage in freed:",
        "if event > 0:",
        "tracing",
    ),
    Fault(
        "tracing/recording/steady_state.py",
        "for column in (log.scratch, log.unverified, log.streams):",
        "for column in (log.scratch, log.unverified):",
        "tracing",
    ),
    Fault(
        "tracing/cuda/kernel_dtypes.py",
        "if one != other and call.func",
        "if one == other and call.func",
        "tracing",
    ),
    Fault(
        "tracing/values/value_checks.py",
        'if dis.opname[last[0].co_code[trace.tb_lasti]] != "RAISE_VARARGS":',
        'if dis.opname[last[0].co_code[trace.tb_lasti]] == "RAISE_VARARGS":',
        "tracing",
    ),
    Fault(
        "tracing/recording/tensor_owners.py",
        "if owners.setdefault(index, layer) != layer:",
        "if owners.setdefault(index, layer) == layer:",
        "tracing planning",
    ),
    Fault(
        "tracing/cuda/dispatch/autocast.py",
        "positional = [cast(value) for value in reversed(args)]",
        "positional = [cast(value) for value in args][::-1]",
        "tracing",
    ),
    Fault(
        "tracing/cuda/dispatch/composite_ops.py",
        "if train and 0 < p < 1 and x.numel() > 0:",
        "if train and 0 < p < 2 and x.numel() > 0:",
        "tracing",
    ),
    Fault(
        "tracing/cuda/dispatch/composite_ops.py",
        "aten.group_norm.default, x.contiguous(), *rest",
        "aten.group_norm.default, x, *rest",
        "tracing",
    ),
    Fault(
        "tracing/recording/storage_log.py",
        "            and self.in_optimizer",
        "            and True",
        "tracing",
    ),
    Fault(
        "tracing/cuda/dispatch/thread_kernels.py",
        "if name not in kernels:",
        "if False:",
        "tracing/test_other_threads.py",
    ),
    Fault(
        "tracing/isolation/private_generators.py",
        "if alone and threading.active_count() == 1:",
        "if True:",
        "tracing/test_other_threads.py",
    ),
    # Training.
    Fault(
        "applying/run/optimizer_update.py",
        "return self._fake or scaler.get_scale() >= before",
        "return True",
        "applying",
    ),
    Fault(
        "applying/loss/chunked_loss.py",
        "return functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]",
        "return labels",
        "applying",
    ),
    Fault(
        "applying/loss/chunked_loss.py",
        "return [size + (part < left) for part in range(parts)]",
        "return [size + (part <= left) for part in range(parts)]",
        "applying",
    ),
    Fault(
        "applying/run/accumulation.py",
        "return 1.0 if share else self.planned / relative",
        "return 1.0 if share else self.planned * relative",
        "applying",
    ),
    Fault(
        "applying/checkpointing/selective.py",
        "            if _storage(tensor) in saved:",
        "            if False:",
        "applying",
    ),
    # What is measured and kept.
    Fault(
        "measuring/compare_gradients.py",
        "return math.inf if math.isnan(error) else error",
        "return error",
        "verifying",
    ),
    Fault(
        "measuring/categories.py",
        "    if peak.step > 0:",
        "    if peak.step > 9:",
        "verifying",
    ),
    Fault(
        "traces/cache/package_hash.py",
        "max(stat.st_mtime for stat in stats) > _STARTED_S",
        "False",
        "planning/test_trace_key.py",
    ),
    Fault(
        "calibration/known_measurements.py",
        "    if len(plausible) < len(same):",
        "    if len(plausible) > len(same):",
        "planning verifying",
    ),
)
