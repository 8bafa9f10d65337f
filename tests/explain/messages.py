"""Out-of-memory messages as users published them, and one of each other wording.

The published ones name their issue. TORCH_2_13, LIMITED and EXABYTE were written by
torch 2.13 itself, on the null driver (tests/accuracy/nulldriver).
"""

# github.com/pytorch/pytorch/issues/16417 (torch 1.0)
TORCH_1_0 = (
    "RuntimeError: CUDA out of memory. Tried to allocate 12.50 MiB (GPU 0; 10.92 GiB "
    "total capacity; 8.57 MiB already allocated; 9.28 GiB free; 4.68 MiB cached)"
)
# github.com/2KangHo/vdsr_pytorch/issues/2 (1.5)
TORCH_1_5 = (
    "RuntimeError: CUDA out of memory. Tried to allocate 512.00 MiB (GPU 1; 15.90 GiB "
    "total capacity; 13.13 GiB already allocated; 415.88 MiB free; 14.80 GiB reserved "
    "in total by PyTorch)"
)
# github.com/meta-llama/llama-cookbook/issues/320 (2.1, in a container)
TORCH_2_1 = (
    "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 10.08 GiB. GPU "
    "0 has a total capacty of 22.20 GiB of which 687.12 MiB is free. Process 40666 has "
    "21.53 GiB memory in use. Of the allocated memory 9.71 GiB is allocated by "
    "PyTorch, and 10.61 GiB is reserved by PyTorch but unallocated. If reserved but "
    "unallocated memory is large try setting max_split_size_mb to avoid fragmentation. "
    " See documentation for Memory Management and PYTORCH_CUDA_ALLOC_CONF"
)
# github.com/awslabs/keys_values/issues/92 (2.9, four ranks on the first card)
TORCH_2_9 = (
    "[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 572.00 "
    "MiB. GPU 0 has a total capacity of 39.49 GiB of which 321.31 MiB is free. Process "
    "3721648 has 414.00 MiB memory in use. Including non-PyTorch memory, this process "
    "has 37.46 GiB memory in use. Process 1374765 has 414.00 MiB memory in use. "
    "Process 1374763 has 414.00 MiB memory in use. Process 1374764 has 414.00 MiB "
    "memory in use. Of the allocated memory 36.04 GiB is allocated by PyTorch, and "
    "321.37 MiB is reserved by PyTorch but unallocated. If reserved but unallocated "
    "memory is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid "
    "fragmentation."
)
# github.com/ROCm/TheRock/issues/2118 (2.9, a limit, private pools)
ROCM = (
    "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 2.00 MiB. GPU 0 has "
    "a total capacity of 255.98 GiB of which 244.65 GiB is free. 1.05 GiB allowed; Of "
    "the allocated memory 1017.01 MiB is allocated by PyTorch, with 17.00 MiB "
    "allocated in private pools (e.g., HIP Graphs), and 54.99 MiB is reserved by "
    "PyTorch but unallocated."
)
# github.com/Wan-Video/Wan2.1/issues/465 (2.7)
FULL = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 100.00 MiB. GPU 0 "
    "has a total capacity of 31.37 GiB of which 15.88 MiB is free. Including "
    "non-PyTorch memory, this process has 31.34 GiB memory in use. Of the allocated "
    "memory 30.74 GiB is allocated by PyTorch, and 19.41 MiB is reserved by PyTorch "
    "but unallocated."
)
# On Windows, torch 2.0: github.com/YingqianWang/iPASSR/issues/9
PAGED = (
    "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 10.73 GiB (GPU "
    "0; 8.00 GiB total capacity; 17.20 GiB already allocated; 0 bytes free; 19.15 GiB "
    "reserved in total by PyTorch) If reserved memory is >> allocated memory try"
)
# With torch 2.1: github.com/wxian3/NeuroLens/issues/2
ONE_TENSOR = (
    "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 55.57 GiB. GPU "
    "0 has a total capacty of 12.00 GiB of which 9.02 GiB is free. Of the allocated "
    "memory 984.52 MiB is allocated by PyTorch, and 463.48 MiB is reserved by PyTorch "
    "but unallocated."
)
TORCH_2_13 = (
    "CUDA out of memory. Tried to allocate 5.96 GiB. GPU 0 has a total capacity of "
    "23.64 GiB of which 3.24 GiB is free. Of the allocated memory 20.40 GiB is "
    "allocated by PyTorch, and 5.44 MiB is reserved by PyTorch but unallocated. If "
    "reserved but unallocated memory is large try setting "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See "
    "documentation for Memory Management"
)
LIMITED = (
    "CUDA out of memory. Tried to allocate 5.96 GiB. GPU 0 has a total capacity of "
    "23.64 GiB of which 15.16 GiB is free. 11.82 GiB allowed; Of the allocated memory "
    "8.47 GiB is allocated by PyTorch, and 13.11 MiB is reserved by PyTorch but "
    "unallocated. If reserved but unallocated memory is large try setting"
)
EXABYTE = "CUDA out of memory. Tried to allocate more than 1EB memory."
ASYNC = """torch.OutOfMemoryError: Allocation on device 0 would exceed allowed memory. \
(out of memory)
Currently allocated     : 10.07 GiB
Requested               : 2.00 MiB
Device limit            : 23.99 GiB
Free (according to CUDA): 0 bytes
PyTorch limit (set by user-supplied memory fraction)
                        : 17179869184.00 GiB"""
HOST = (
    "RuntimeError: [enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: "
    "can't allocate memory: you tried to allocate 4398046511104 bytes. Error code 12"
)
DRIVER = "RuntimeError: CUDA error: out of memory\nCUDA kernel errors might be"
LIBRARY = "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublas`"

WITH_NUMBERS = (
    TORCH_1_0,
    TORCH_1_5,
    TORCH_2_1,
    TORCH_2_9,
    ROCM,
    FULL,
    PAGED,
    ONE_TENSOR,
    TORCH_2_13,
    LIMITED,
)
ALL = (*WITH_NUMBERS, EXABYTE, ASYNC, HOST, DRIVER, LIBRARY)
