"""Several GPUs in the exported training script: what torchrun starts."""

import json
import pprint
from collections.abc import Collection
from typing import Any

from budgetfit.applying.zero import deepspeed_config
from budgetfit.core.parallelism import BACKENDS, Parallelism
from budgetfit.core.recipe import Recipe
from budgetfit.integrations.source_code.plain_torch_templates import Part
from budgetfit.integrations.source_code.python_source import (
    DTYPES,
    keyword_lines,
    to_source,
)


def ranks_parts(recipe: Recipe, block_types: Collection[str]) -> list[Part]:
    """Return the source that wraps the model; nothing for one GPU.

    ``block_types``: names of the classes of its blocks.
    """
    parallelism = recipe.parallelism
    if parallelism is None:
        return []
    join = JOIN
    if parallelism.cpu_offload:  # gradients are clipped in host memory
        join = join.replace('"nccl" if', f'"{BACKENDS}" if')
    parts = [Part(join, ("import os", "import torch.distributed as dist"))]
    if parallelism.engine == "ddp":
        return [*parts, Part(_ddp(parallelism), (_DDP,))]
    if parallelism.engine == "deepspeed":
        return [*parts, Part(_ENGINE, ("import deepspeed",))]
    checkpoint = ("import torch.distributed.checkpoint as dcp", _STATE)
    fsdp = _FSDP_OFFLOADED if parallelism.cpu_offload else _FSDP
    lists = not _LISTS.isdisjoint(block_types)
    wraps = Part(_fsdp2(parallelism, lists=lists), (fsdp, _MESH))
    modules = [Part(_WITH_FORWARD)] if lists else []
    return [*parts, *modules, wraps, Part(STATES, checkpoint)]


def ranks_constants(recipe: Recipe, blocks: tuple[str, ...]) -> list[str]:
    """Return the constants of ranks and of the blocks that are sharded."""
    parallelism = recipe.parallelism
    if parallelism is None:
        return []
    lines = [f"RANKS = {parallelism.gpus}  # one process for each GPU"]
    if parallelism.engine == "deepspeed":
        config = pprint.pformat(deepspeed_config(recipe), sort_dicts=False, width=84)
        lines.append(f"ZERO = {config}")
    elif parallelism.engine == "fsdp2":
        names = "".join(f"    {to_source(name)},\n" for name in blocks)
        lines.append(
            f"SHARDED = [  # blocks whose weights are gathered alone\n{names}]"
        )
    return lines


def launch_line(
    parallelism: Parallelism, what: str = "it", file: str = "THIS_FILE"
) -> str:
    """Return the command that starts a script, for its docstring."""
    where = " (on each machine; HOST is one of them)" if parallelism.nodes > 1 else ""
    return f"Start {what} with: {parallelism.torchrun} {file}{where}"


def main_lines(parallelism: Parallelism | None) -> dict[str, str]:
    """Return what the training loop has for ranks, by the template's names."""
    if parallelism is None:
        return _ONE
    is_ddp = parallelism.engine == "ddp"
    last = "part == GRADIENT_ACCUMULATION_STEPS - 1"
    if parallelism.sync_each_batch:
        sync = ""
    elif parallelism.engine == "deepspeed":
        sync = f"            model.set_gradient_accumulation_boundary({last})\n"
    elif is_ddp:  # what no_sync() sets
        sync = f"            model.require_backward_grad_sync = {last}\n"
    else:
        sync = f"            model.set_requires_gradient_sync({last})\n"
    found = {
        **_ONE,
        "device": _DEVICE,
        "place": "    model.to(device)\n" if is_ddp else "",
        "wrap": _WRAP,
        "sync": sync,
        "mean": "        dist.all_reduce(step_loss.div_(RANKS))\n",
        "show": "        if dist.get_rank() == 0:\n            ",
        "end": "    dist.destroy_process_group()\n",
    }
    if parallelism.engine == "deepspeed":
        own = {"wrap": "", "engine": _START, "resume": _LOAD_ENGINE}
        return {**found, **own, "save": _SAVE_ENGINE}
    if is_ddp:
        own = {"states": "model.module", "save": _FIRST_RANK, "end": _END_DDP}
        return {**found, **own}
    return {**found, "resume": _RESUME, "save": _SAVE}


def ddp_settings(parallelism: Parallelism) -> dict[str, Any]:
    """Return the arguments of ``DistributedDataParallel``, without its defaults."""
    names = ("bucket_cap_mb", "gradient_as_bucket_view")
    given = {name: getattr(parallelism, name) for name in names}
    return {name: value for name, value in given.items() if value}


def _ddp(parallelism: Parallelism) -> str:
    given = keyword_lines(ddp_settings(parallelism))
    return (
        "def wrap(model, device):\n"
        '    """Let each rank hold the whole model, and exchange gradients."""\n'
        "    return DistributedDataParallel(\n"
        "        model,\n"
        '        device_ids=[device] if device.type == "cuda" else None,\n'
        f"{given}    )\n"
    )


def _fsdp2(parallelism: Parallelism, *, lists: bool) -> str:
    copies, gpus = parallelism.replicate, parallelism.gpus
    shape: tuple[int, ...] = (copies, gpus // copies) if parallelism.shard else (gpus,)
    names = json.dumps(("dp_replicate", "dp_shard")[-len(shape) :])
    policy: dict[str, Any] = {
        "param_dtype": parallelism.param_dtype,
        "reduce_dtype": parallelism.reduce_dtype,
    }
    given = ", ".join(
        f"{name}=torch.{DTYPES[dtype]}" for name, dtype in policy.items() if dtype
    )
    return (
        "def wrap(model, device):\n"
        '    """Shard the weights over the ranks, block by block."""\n'
        f"{_REFUSE_HOOKS}"
        f"    mesh = init_device_mesh(device.type, {shape}, mesh_dim_names={names})\n"
        f"    policy = MixedPrecisionPolicy({given})\n"
        '    settings = {"mesh": mesh, "mp_policy": policy}\n'
        f"{_OFFLOAD if parallelism.cpu_offload else ''}"
        f"    reshard = {parallelism.reshard_after_forward}\n"
        f"    for name in SHARDED:\n{_SHARD_LIST if lists else _SHARD}"
        "    return fully_shard(model, **settings)\n"
    )


_LISTS = {"ModuleList", "ModuleDict", "ParameterList", "ParameterDict"}
_WITH_FORWARD = '''\
def with_forward(module):
    """Return the module, or those in a list of modules, which run one by one."""
    if type(module).forward is not torch.nn.Module.forward:
        return [module]
    return [each for child in module.children() for each in with_forward(child)]
'''
_SHARD = """\
        block = model.get_submodule(name)
        fully_shard(block, reshard_after_forward=reshard, **settings)
"""
_SHARD_LIST = """\
        modules = with_forward(model.get_submodule(name))
        if modules:  # else parameters alone, which are gathered with the rest
            fully_shard(modules, reshard_after_forward=reshard, **settings)
"""
_REFUSE_HOOKS = """\
    for name, item in model.named_parameters():
        if item._backward_hooks or item._post_accumulate_grad_hooks:
            raise SystemExit(
                f"fully_shard would drop the hooks of {name}: add them after it, by "
                "register_post_accumulate_grad_hook, for this rank's shard"
            )
"""
_DDP = "from torch.nn.parallel import DistributedDataParallel"
# DDP's reducer, as the group's last owner, deadlocks with gloo's threads
# (github.com/pytorch/pytorch/issues/56297).
_END_DDP = """\
    del data, model  # before their process group
    dist.destroy_process_group()
"""
_FSDP = "from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard"
_FSDP_OFFLOADED = """\
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    fully_shard,
)"""
_OFFLOAD = """\
    pinned = device.type == "cuda"
    settings["offload_policy"] = CPUOffloadPolicy(pin_memory=pinned)
"""
_MESH = "from torch.distributed.device_mesh import init_device_mesh"
_STATE = """\
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)"""

JOIN = '''\
def join_ranks(name):
    """Join the other ranks; return the device of this one."""
    device = torch.device(name, int(os.environ["LOCAL_RANK"]) if name == "cuda" else 0)
    if name == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if name == "cuda" else "gloo")
    if dist.get_world_size() != RANKS:
        raise SystemExit(f"{dist.get_world_size()} processes, planned for {RANKS}")
    return device
'''

STATES = '''\
def save(model, optimizer, folder, **more):
    """Save each rank's shards, and more; load takes them on any number of ranks."""
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states, **more}, checkpoint_id=folder)


def load(model, optimizer, folder, **more):
    """Load what save wrote, and return it."""
    weights, states = get_state_dict(model, optimizer)
    there = " ".join(dcp.FileSystemReader(folder).read_metadata().state_dict_metadata)
    states["state"] = {  # none of parameters that had no gradient before it was saved
        name: state
        for name, state in states["state"].items()
        if f"optimizer.state.{name}." in there
    }
    saved = {"model": weights, "optimizer": states, **more}
    dcp.load(saved, checkpoint_id=folder)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=saved["model"],
        optim_state_dict=saved["optimizer"],
        options=StateDictOptions(strict=False),
    )
    return saved
'''

_ONE = {
    "device": "    device = torch.device(name)\n",
    "place": "    model.to(device)\n",
    "wrap": "",
    "engine": "",
    "sync": "",
    "mean": "",
    "show": "        ",
    "end": "",
    "states": "model",
    "resume": """\
        state = torch.load(options.resume, map_location="cpu", weights_only=True)
        $states.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
$load_scaler        del state
""",
    "save": """\
    if options.save:
        state = {"model": $states.state_dict(), "optimizer": optimizer.state_dict()}
$save_scaler        torch.save(state, options.save)
""",
}
_DEVICE = "    device = join_ranks(name)\n"
_WRAP = """\
    model = wrap(model, device)
    torch.manual_seed(options.seed + 1 + dist.get_rank())  # other data, other dropout
"""
_ENGINE = '''\
def start_engine(model, optimizer, max_grad_norm):
    """Hand model and optimizer to DeepSpeed, which shards them over the ranks."""
    config = {**ZERO, "gradient_clipping": max_grad_norm}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine
'''
_START = """\
    model = start_engine(model, optimizer, options.max_grad_norm)
    torch.manual_seed(options.seed + 1 + dist.get_rank())  # other data, other dropout
"""
_LOAD_ENGINE = """\
        if model.load_checkpoint(options.resume)[0] is None:
            raise SystemExit(f"no checkpoint of DeepSpeed in {options.resume}")
"""
_SAVE_ENGINE = "    if options.save:\n        model.save_checkpoint(options.save)\n"
_FIRST_RANK = _ONE["save"].replace(
    "if options.save:", "if options.save and dist.get_rank() == 0:"
)
_RESUME = """\
        ${loaded}load(model, optimizer, options.resume$more)
$load_scaler"""
_SAVE = """\
    if options.save:
        save(model, optimizer, options.save$more)
"""
