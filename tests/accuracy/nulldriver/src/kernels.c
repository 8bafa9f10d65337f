/* Kernels: they register when a library is loaded, and are launched into nothing. */
#include "null_device.h"
#include "compiled_archs.h" /* generated: static const int COMPILED_ARCHS[] */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ------------------------------------------------------------------- their names ---- */

/* Kept only for NULLCUDA_TRACE=kernels: an open hash table from a kernel's host function
 * to its name, as large as any wheel needs (torch 2.13 registers 22,000 kernels). */
#define NAME_ROOM ((size_t)1 << 18)
static struct named {
    const void *kernel;
    const char *name;
} *names;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static struct named *slot_of(const void *kernel) {
    size_t slot = ((uintptr_t)kernel >> 4) * 0x9E3779B97F4A7C15ULL % NAME_ROOM;
    while (names[slot].kernel && names[slot].kernel != kernel) slot = (slot + 1) % NAME_ROOM;
    return &names[slot];
}

/* Registration may come before this library's constructor: ask the environment itself. */
void __cudaRegisterFunction(void **binary, const char *kernel, char *unused, const char *name, int thread_limit,
                            void *thread, void *block, void *block_size, void *grid_size, int *warp_size) {
    static int wanted = -1;
    pthread_mutex_lock(&lock);
    if (wanted < 0) {
        const char *words = getenv("NULLCUDA_TRACE");
        wanted = words && strstr(words, "kernels");
        if (wanted) names = calloc(NAME_ROOM, sizeof *names);
    }
    if (names) *slot_of(kernel) = (struct named){kernel, name};
    pthread_mutex_unlock(&lock);
}

static void trace_launch(const void *kernel) {
    if (!device.trace_kernels || !names) return;
    const char *name = slot_of(kernel)->name;
    fprintf(stderr, "[null driver] launch %s\n", name ? name : "a kernel without a name");
}

/* ----------------------------------------------------------- registering, launching ---- */

void **__cudaRegisterFatBinary(void *binary) {
    static void *handle[4];
    return handle;
}

/* A launch first pushes its configuration (a generated stub), then pops it again. */
unsigned __cudaPopCallConfiguration(void *grid, void *block, size_t *shared_bytes, void *stream) {
    memset(grid, 0, sizeof(dim3));
    memset(block, 0, sizeof(dim3));
    *shared_bytes = 0;
    *(void **)stream = NULL;
    return 0;
}

/* From CUDA 13 on, a launch names its kernel by a handle: here the host function itself. */
cudaError_t __cudaGetKernel(void **handle, const void *kernel) {
    *handle = (void *)kernel;
    return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(const void *kernel, dim3 grid, dim3 block, void **arguments, size_t shared_bytes,
                               cudaStream_t stream) {
    trace_launch(kernel);
    return cudaSuccess;
}
cudaError_t cudaLaunchKernel(const void *kernel, dim3 grid, dim3 block, void **arguments, size_t shared_bytes,
                             cudaStream_t stream) {
    trace_launch(kernel);
    return cudaSuccess;
}
cudaError_t cudaLaunchCooperativeKernel(const void *kernel, dim3 grid, dim3 block, void **arguments,
                                        size_t shared_bytes, cudaStream_t stream) {
    trace_launch(kernel);
    return cudaSuccess;
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *configuration, const void *kernel, void **arguments) {
    trace_launch(kernel);
    return cudaSuccess;
}

cudaError_t cudaGetSymbolAddress(void **address, const void *symbol) {
    *address = address_of_device_globals();
    return cudaSuccess;
}

/* --------------------------------------------------------- what they would need ---- */

/* CUB tunes by the architecture that a kernel was compiled for, and fails on one that is
 * not in the binary: the answer is the newest in it that this device can run. */
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *kernel) {
    int capability = 10 * device.major + device.minor, newest = COMPILED_ARCHS[0];
    for (size_t i = 0; i < sizeof COMPILED_ARCHS / sizeof *COMPILED_ARCHS; i++)
        if (COMPILED_ARCHS[i] <= capability && COMPILED_ARCHS[i] > newest) newest = COMPILED_ARCHS[i];
    memset(attributes, 0, sizeof *attributes);
    attributes->ptxVersion = attributes->binaryVersion = newest;
    attributes->maxThreadsPerBlock = 1024;
    attributes->maxDynamicSharedSizeBytes = 48 * KIB;
    attributes->numRegs = 32;
    return cudaSuccess;
}

static int smaller(int a, int b) { return a < b ? a : b; }

/* Occupancy by threads, blocks, shared memory and 32 registers per thread. The real count
 * of registers is in the machine code; it only reaches small scratch buffers of CUB. */
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *kernel, int block_size,
                                                                   size_t shared_bytes, unsigned flags) {
    int threads = (int)round_up(block_size > 0 ? block_size : 1, 32);
    int most = smaller(device.blocks_per_sm, device.threads_per_sm / threads);
    most = smaller(most, 65536 / (32 * threads));
    if (shared_bytes) most = smaller(most, (int)(device.shared_per_sm_bytes / (shared_bytes + KIB)));
    *blocks = most < 1 ? 1 : most;
    return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *kernel, int block_size,
                                                          size_t shared_bytes) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, kernel, block_size, shared_bytes, 0);
}
