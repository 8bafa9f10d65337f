"""The table of what a plan changes in PyTorch, Python and libraries while it traces.

Everything is put back when a trace ends, also after an error. Of the changes that every
thread meets, the last column says what another thread notices. A test compares the
names before, during and after plans with this table.
"""

from typing import Final, NamedTuple


class Patch(NamedTuple):
    """A thing of the process that is changed.

    Attributes:
        name: Dotted name of an attribute, or what it is in words.
        file: Where it is changed and put back, from the package's folder.
        why: What a trace would get wrong without it.
        others: What other threads notice; empty: nothing.
    """

    name: str
    file: str
    why: str
    others: str = ""


_DISPATCH = "tracing/cuda/dispatch/thread_kernels.py"
_LIBRARIES = "tracing/values/library_patches.py"
_KERNELS = "tracing/cuda/triton/device_answers.py"
_INDUCTOR = "tracing/compiled/inductor_answers.py"
_LOOPS = "traces/loops/library_state.py"
_TORCH = "tracing/isolation/torch_state.py"
_RANKS = "tracing/recording/distributed"
_FAKES = "fake tensors of its own are treated so, too"

PATCHES: Final = (
    Patch(
        "kernels of aten ops for AutocastCPU",
        _DISPATCH,
        "CUDA's autocast casts other ops than the CPU's",
        "no other numbers; some microseconds per op while they are registered, which "
        "is as long as another thread is alive",
    ),
    Patch(
        "kernels of aten ops for AutogradCPU",
        _DISPATCH,
        "PyTorch's C++ takes other branches for CUDA tensors: attention, dropout, RNNs",
        "as above",
    ),
    Patch(
        "torch.autocast.__init__, torch.autocast.__enter__, torch.autocast.__exit__, "
        "torch.amp.autocast_mode._cast",
        "tracing/cuda/dispatch/autocast.py",
        "autocast of CUDA acts on the CPU, which plays its part",
    ),
    Patch(
        "torch.clear_autocast_cache",
        "tracing/cuda/dispatch/autocast.py",
        "the casts that the trace has cached are dropped with torch's own",
    ),
    Patch(
        "torch.autograd._engine_run_backward",
        "tracing/cuda/node_order.py, tracing/recording/loop_recorder.py",
        "gradients of gradients are computed in CUDA's order, and a gradient that a "
        "forward asks for does not end it",
    ),
    Patch(
        "torch.tensor",
        _LIBRARIES,
        "it reads lists of fake tensors without a dispatch",
        _FAKES,
    ),
    Patch(
        "torch.utils.swap_tensors",
        _LIBRARIES,
        "it refuses fake weights that are converted to the dtype that they have",
        "a conversion that changes nothing swaps nothing",
    ),
    Patch(
        "torch.autograd.graph.save_on_cpu.__init__",
        _LIBRARIES,
        "in a trace all tensors are on the CPU: its copies would count as the GPU's",
        "hooks that it makes meanwhile copy tensors of any device as an offload does",
    ),
    Patch(
        "_get_foreach_kernels_supported_devices and _get_capturable_supported_devices "
        "of torch.optim's modules, lists _foreach_supported_types",
        "tracing/cuda/optimizer_choices.py",
        "optimizers and clipping choose foreach and capturable as on CUDA",
        _FAKES,
    ),
    Patch(
        "torch._subclasses.fake_tensor.FakeTensor.numpy",
        _LIBRARIES,
        "models read tables of indices",
        _FAKES,
    ),
    Patch(
        "torch._subclasses.fake_tensor.FakeTensor.tolist",
        _LIBRARIES,
        "torch reads each item with an op of its own: minutes for long offsets",
        _FAKES,
    ),
    Patch(
        "torch._subclasses.fake_tensor.FakeTensor.__format__",
        _LIBRARIES,
        "models name layers by numbers that are tensors",
        _FAKES,
    ),
    Patch(
        "deepcopy of FakeTensor",
        "traces/loops/prepare.py",
        "a copy of the weights (EMA) is made of fakes; loops with one alone",
        _FAKES,
    ),
    Patch(
        "torch.nn.utils.clip_grad._has_foreach_support",
        _LOOPS,
        "gradients are clipped as on CUDA; libraries' loops alone",
        "gradients of tensor subclasses are clipped with foreach",
    ),
    Patch(
        "accelerate's state of the process, environment variables",
        _LOOPS,
        "a traced Trainer has an Accelerator of its own; libraries' loops alone",
        "an Accelerator that is made meanwhile is lost",
    ),
    Patch(
        "trl.kernels.chunked_logprob, trl.trainer.utils._use_triton",
        "traces/loops/trl_kernels.py",
        "TRL's head takes other memory on a CPU; loop='sft' alone",
        "TRL's head computes nothing meanwhile",
    ),
    Patch(
        "transformers.trainer.set_seed",
        "traces/loops/trainer.py",
        "a Trainer seeds the generators of the process; loop='trainer' and 'sft' alone",
        "a Trainer that begins meanwhile is not seeded",
    ),
    Patch(
        "triton.runtime.jit.JITFunction.run, triton.runtime.autotuner.Autotuner.run",
        "tracing/cuda/triton/launches.py",
        "a kernel on tensors without memory is counted, not launched; where Triton is "
        "loaded",
        "kernels on real tensors are launched as ever",
    ),
    Patch(
        "torch.cuda.is_available, torch.cuda.current_device, "
        "torch.cuda.get_device_capability, torch.cuda.get_device_properties, "
        "torch.cuda.device.__init__, torch.cuda.device.__enter__, "
        "torch.cuda.device.__exit__",
        _KERNELS,
        "code with Triton kernels allocates what the GPU of the plan asks for; where "
        "Triton is loaded",
    ),
    Patch(
        "torch._subclasses.fake_tensor.FakeTensor.device, "
        "torch._subclasses.fake_tensor.FakeTensor.is_cuda",
        "tracing/cuda/device_questions.py",
        "a plan says where code takes another branch on CUDA",
    ),
    Patch(
        "torch._subclasses.fake_tensor.FakeTensor.device, "
        "torch._subclasses.fake_tensor.FakeTensor.is_cuda",
        _KERNELS,
        "code with Triton kernels allocates what the GPU of the plan asks for; where "
        "Triton is loaded",
    ),
    Patch(
        "torch.cuda.is_available, torch.cuda.device_count, torch.cuda.current_device, "
        "torch.cuda.set_device, torch.cuda.synchronize, torch.cuda.device, "
        "torch.cuda.get_device_capability, torch.cuda.get_device_name, "
        "torch.cuda.get_device_properties, torch.cuda.get_rng_state, "
        "torch.cuda.set_rng_state, torch.cuda._DeviceGuard, torch.version.cuda, "
        "torch._dynamo.device_interface.CudaInterface",
        _INDUCTOR,
        "inductor generates code for the GPU of the plan; compile='blocks' alone",
        "CUDA seems to be here for the seconds in which code is generated",
    ),
    Patch(
        "the device guard of CUDA, kernels of aten::empty for CUDA",
        _INDUCTOR,
        "as above; where PyTorch is built without CUDA",
    ),
    Patch(
        "functions and settings of torch._inductor, module triton",
        _INDUCTOR,
        "as above",
        "what is compiled meanwhile is compiled for that GPU",
    ),
    Patch(
        "modules and classes of transformers, torch.nn.functional",
        _LOOPS,
        "Liger replaces parts of them when a Trainer begins; use_liger_kernel=True "
        "alone",
        "models run with Liger's functions meanwhile",
    ),
    Patch(
        "the default process group, sys.excepthook",
        f"{_RANKS}/process_group.py",
        "torch's fake one has the ranks of the plan; for several GPUs alone",
        "a process group is there meanwhile; one of their own cannot be made",
    ),
    Patch(
        "torch.UntypedStorage.resize_, "
        "torch.distributed.fsdp._fully_shard._fsdp_init._move_states_to_device, "
        "torch.distributed.tensor._sharding_prop.ShardingPropagator."
        "_propagate_tensor_meta_non_cached",
        f"{_RANKS}/fully_sharded.py",
        "FSDP2 allocates and frees without an op; engine='fsdp2' alone",
        "storages that they resize are logged; fully_shard moves no weights",
    ),
    Patch(
        "torch.distributed.device_mesh.init_device_mesh, "
        "torch.distributed.device_mesh.DeviceMesh.__init__, "
        "torch.distributed.device_mesh.DeviceMesh._concatenate, "
        "torch.distributed.fsdp._fully_shard._fsdp_init._get_post_forward_mesh_info, "
        "torch.distributed.fsdp._fully_shard._fully_shard._get_post_forward_mesh_info",
        f"{_RANKS}/fully_sharded.py",
        "meshes read ranks out of tensors, which fakes have not; engine='fsdp2' alone",
    ),
    Patch(
        "torch.nn.parallel.distributed.DistributedDataParallel.__init__, "
        "torch.nn.parallel.distributed._verify_param_shape_across_processes",
        f"{_RANKS}/data_parallel.py",
        "its reducer reads tensors of fakes; engine='ddp' alone",
        "a DDP that is made meanwhile does not build its buckets again",
    ),
    Patch(
        "deepspeed.accelerator.real_accelerator.ds_accelerator, "
        "variables of deepspeed.comm.comm and deepspeed.utils.groups, LOCAL_RANK",
        f"{_RANKS}/deepspeed_zero.py",
        "DeepSpeed asks for CUDA's streams and for this process's groups; "
        "engine='deepspeed' alone",
        "DeepSpeed in another thread would train on the trace's accelerator",
    ),
    Patch(
        "deepspeed.runtime.engine.DeepSpeedEngine._broadcast_model, "
        "deepspeed.runtime.zero.stage3.defragment, has_overflow of its optimizers, "
        "is_invalid_grad_norm in deepspeed.runtime.zero.stage_1_and_2 and stage3",
        f"{_RANKS}/deepspeed_zero.py",
        "weights go through host memory, and fakes have no values to check; "
        "engine='deepspeed' alone",
        "DeepSpeed in another thread finds no infinite gradients",
    ),
    Patch(
        "record_stream of torch.Tensor, synchronize of torch.cpu.Stream, "
        "linear of torch.nn.functional, data_ptr of FakeTensor, logging below errors",
        f"{_RANKS}/deepspeed_zero.py",
        "streams of the CPU are streams in name, ZeRO-3 replaces linear for good, and "
        "fakes have no address; engine='deepspeed' alone",
        "tensors that they use on several streams may return to the pool early",
    ),
    Patch(
        "transformers.utils.import_utils.is_fake_tensor",
        _LIBRARIES,
        "transformers skips checks for fakes that a real step makes",
        _FAKES,
    ),
    Patch(
        "random.*, numpy.random.*",
        "tracing/isolation/private_generators.py",
        "a trace draws no numbers that the program would draw",
    ),
    Patch(
        "single numbers from random and numpy.random",
        "tracing/isolation/scalar_randomness.py",
        "layers are left out at random: the one that takes the most is planned for",
    ),
    Patch(
        "states of the global random generators",
        "tracing/isolation/private_generators.py",
        "for what is drawn by names that were imported from random",
        "not put back while another thread is alive",
    ),
    Patch(
        "sys.meta_path",
        "tracing/isolation/imports.py",
        "modules that are imported in a forward must not be traced",
        "their imports go through one more finder",
    ),
    Patch(
        "garbage collection",
        "tracing/isolation/python_state.py, utils/garbage_collection.py",
        "it would free tensors in the middle of a trace, and takes long",
        "off during a trace",
    ),
    Patch(
        "functools.lru_cache of the model's code",
        "tracing/isolation/lru_caches.py",
        "no fake tensor may stay in them",
        "entries are computed again",
    ),
    Patch(
        "globals, attributes, closures and defaults of the user's code",
        "tracing/isolation/user_state.py",
        "no fake tensor may stay in them",
        "what it sets there during a trace is undone",
    ),
    Patch(
        "torch's default dtype",
        _TORCH,
        "fp32 is planned for; changed only where it is another",
        "fp32 during a plan",
    ),
    Patch(
        "deterministic algorithms, anomaly detection",
        _TORCH,
        "they take memory that is not predicted; changed only where they are on",
        "off during a plan",
    ),
    Patch(
        "global module hooks",
        _TORCH,
        "they add to the graph; changed only where there are any",
        "not called during a plan; one that is removed meanwhile comes back",
    ),
    Patch(
        "logging below errors",
        "integrations/optional_imports.py, cli/quiet_libraries.py, "
        "traces/loops/library_state.py",
        "libraries warn about themselves while they are imported",
        "warnings of other threads are not logged during an import",
    ),
    Patch(
        "keras.src.backend.torch.random.torch_seed_generator",
        "integrations/model_sources/keras_model.py",
        "a fake seed has no value; Keras models alone",
        "layers with random numbers draw from any generator",
    ),
)
