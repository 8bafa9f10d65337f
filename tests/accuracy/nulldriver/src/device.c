/* The imitated card: its numbers, and every question about them.
 *
 * Environment, set by run.py from the card table:
 *   NULLCUDA_CC              compute capability times ten, for example 89 or 120
 *   NULLCUDA_SM              streaming multiprocessors
 *   NULLCUDA_THREADS_PER_SM  resident threads on each
 *   NULLCUDA_BYTES           device memory; NULLCUDA_GB, in GiB, replaces it
 *   NULLCUDA_CONTEXT_MIB     memory that counts as taken by the CUDA context (0)
 *   NULLCUDA_TRACE           a list of words: "memory" prints every driver allocation
 *                            to stderr, "kernels" every kernel launch
 */
#define _GNU_SOURCE
#include "null_device.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct null_device device;

static double number_from_environment(const char *name, double otherwise) {
    const char *text = getenv(name);
    return text && *text ? atof(text) : otherwise;
}

/* Limits of a compute capability: CUDA C++ Programming Guide, tables "Technical
 * Specifications per Compute Capability" and "Shared Memory Capacity". The rows are in
 * ascending order; a capability that is not listed has the limits of the one below. */
static const struct limits {
    int capability, threads_per_sm, blocks_per_sm;
    int shared_per_sm_kib, shared_per_block_kib;
} LIMITS[] = {
    {60, 2048, 32, 64, 48},     {61, 2048, 32, 96, 48},     {70, 2048, 32, 96, 96},
    {75, 1024, 16, 64, 64},     {80, 2048, 32, 164, 163},   {86, 1536, 16, 100, 99},
    {87, 1536, 16, 164, 163},   {89, 1536, 24, 100, 99},    {90, 2048, 32, 228, 227},
    {100, 2048, 32, 228, 227},  {103, 2048, 32, 228, 227},  {120, 1536, 24, 100, 99},
};

static const struct limits *limits_of(int capability) {
    const struct limits *found = LIMITS;
    for (size_t i = 0; i < sizeof LIMITS / sizeof *LIMITS; i++)
        if (LIMITS[i].capability <= capability) found = &LIMITS[i];
    return found;
}

static int traces(const char *word) {
    const char *words = getenv("NULLCUDA_TRACE");
    return words && strstr(words, word);
}

__attribute__((constructor)) static void read_environment(void) {
    int capability = (int)number_from_environment("NULLCUDA_CC", 90);
    const struct limits *limits = limits_of(capability);
    device.major = capability / 10;
    device.minor = capability % 10;
    device.sm_count = (int)number_from_environment("NULLCUDA_SM", 132);
    device.threads_per_sm =
        (int)number_from_environment("NULLCUDA_THREADS_PER_SM", limits->threads_per_sm);
    device.blocks_per_sm = limits->blocks_per_sm;
    device.shared_per_sm_bytes = limits->shared_per_sm_kib * KIB;
    device.shared_per_block_bytes = limits->shared_per_block_kib * KIB;
    device.total_bytes = (size_t)number_from_environment("NULLCUDA_BYTES", 80.0 * GIB);
    double gib = number_from_environment("NULLCUDA_GB", 0);
    if (gib > 0) device.total_bytes = (size_t)(gib * GIB);
    device.context_bytes = (size_t)(number_from_environment("NULLCUDA_CONTEXT_MIB", 0) * MIB);
    device.trace_memory = traces("memory");
    device.trace_kernels = traces("kernels");
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int ordinal) {
    memset(properties, 0, sizeof *properties);
    *properties = (struct cudaDeviceProp){
        .name = "NullCUDA", /* recordings tell the null driver from a card by this name */
        .totalGlobalMem = device.total_bytes,
        .major = device.major,
        .minor = device.minor,
        .multiProcessorCount = device.sm_count,
        .maxThreadsPerMultiProcessor = device.threads_per_sm,
        .maxBlocksPerMultiProcessor = device.blocks_per_sm,
        .sharedMemPerMultiprocessor = device.shared_per_sm_bytes,
        .sharedMemPerBlockOptin = device.shared_per_block_bytes,
        .sharedMemPerBlock = 48 * KIB,
        /* From 8.0 on, the driver keeps 1 KiB of shared memory for itself in each block. */
        .reservedSharedMemPerBlock = device.major >= 8 ? KIB : 0,
        .regsPerMultiprocessor = 65536,
        .regsPerBlock = 65536,
        .maxThreadsPerBlock = 1024,
        .maxThreadsDim = {1024, 1024, 64},
        .maxGridSize = {2147483647, 65535, 65535},
        .warpSize = 32,
        .l2CacheSize = 48 * MIB,
        .textureAlignment = 512,
        .unifiedAddressing = 1,
        .cooperativeLaunch = 1,
    };
    return cudaSuccess;
}

/* The same facts one by one. What is not listed is a capability that this device does not
 * claim ("no" to memory pools, fabric handles, page tables shared with the host, ...). */
cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int ordinal) {
    struct cudaDeviceProp is;
    cudaGetDeviceProperties(&is, ordinal);
    switch (attribute) {
        case cudaDevAttrComputeCapabilityMajor: *value = is.major; break;
        case cudaDevAttrComputeCapabilityMinor: *value = is.minor; break;
        case cudaDevAttrMultiProcessorCount: *value = is.multiProcessorCount; break;
        case cudaDevAttrMaxThreadsPerMultiProcessor: *value = is.maxThreadsPerMultiProcessor; break;
        case cudaDevAttrMaxBlocksPerMultiprocessor: *value = is.maxBlocksPerMultiProcessor; break;
        case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = (int)is.sharedMemPerMultiprocessor; break;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = (int)is.sharedMemPerBlockOptin; break;
        case cudaDevAttrMaxSharedMemoryPerBlock: *value = (int)is.sharedMemPerBlock; break;
        case cudaDevAttrReservedSharedMemoryPerBlock: *value = (int)is.reservedSharedMemPerBlock; break;
        case cudaDevAttrMaxRegistersPerMultiprocessor: *value = is.regsPerMultiprocessor; break;
        case cudaDevAttrMaxRegistersPerBlock: *value = is.regsPerBlock; break;
        case cudaDevAttrMaxThreadsPerBlock: *value = is.maxThreadsPerBlock; break;
        case cudaDevAttrMaxBlockDimX: *value = is.maxThreadsDim[0]; break;
        case cudaDevAttrMaxBlockDimY: *value = is.maxThreadsDim[1]; break;
        case cudaDevAttrMaxBlockDimZ: *value = is.maxThreadsDim[2]; break;
        case cudaDevAttrMaxGridDimX: *value = is.maxGridSize[0]; break;
        case cudaDevAttrMaxGridDimY: *value = is.maxGridSize[1]; break;
        case cudaDevAttrMaxGridDimZ: *value = is.maxGridSize[2]; break;
        case cudaDevAttrWarpSize: *value = is.warpSize; break;
        case cudaDevAttrL2CacheSize: *value = is.l2CacheSize; break;
        case cudaDevAttrTextureAlignment: *value = (int)is.textureAlignment; break;
        case cudaDevAttrUnifiedAddressing: *value = is.unifiedAddressing; break;
        case cudaDevAttrCooperativeLaunch: *value = is.cooperativeLaunch; break;
        default: *value = 0;
    }
    return cudaSuccess;
}

/* There is one device, number 0, and it is always the current one. */
cudaError_t cudaGetDeviceCount(int *count) {
    *count = 1;
    return cudaSuccess;
}
cudaError_t cudaGetDevice(int *ordinal) {
    *ordinal = 0;
    return cudaSuccess;
}
cudaError_t cudaSetDevice(int ordinal) {
    return ordinal == 0 ? cudaSuccess : cudaErrorInvalidDevice;
}
cudaError_t cudaDeviceCanAccessPeer(int *yes, int from, int to) {
    *yes = 0;
    return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char *text, int length, int ordinal) {
    snprintf(text, length, "0000:00:00.0");
    return cudaSuccess;
}

/* Driver and runtime are exactly as new as the wheel's own headers. */
cudaError_t cudaDriverGetVersion(int *version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int *version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}

const char *cudaGetErrorName(cudaError_t error) {
    return error ? "cudaErrorNullDriver" : "cudaSuccess";
}
const char *cudaGetErrorString(cudaError_t error) {
    static _Thread_local char text[80];
    const char *meaning = error == cudaErrorMemoryAllocation ? "out of memory"
                          : error == cudaErrorNotSupported   ? "not imitated by the null driver"
                                                             : "null driver error";
    snprintf(text, sizeof text, error ? "%s (%d)" : "no error", meaning, (int)error);
    return text;
}
