/* Device memory: addresses and a count of bytes, with nothing behind them.
 *
 * Addresses come in increasing order and are never used twice, so a freed pointer can be
 * told from a live one. They lie where a Linux process maps nothing; touching one from
 * the host is a segmentation fault, as with a real card.
 */
#include "null_device.h"
#include "ranges.h"
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#define FIRST_ADDRESS  0x100000000000ULL /* the page of device globals, then cudaMalloc */
#define FIRST_MAPPED   0x300000000000ULL /* cuMemAddressReserve */
#define BEYOND_ADDRESS 0x500000000000ULL

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct ranges allocations;
static size_t used_bytes, peak_bytes;

int is_device_address(const void *address) {
    return (uintptr_t)address >= FIRST_ADDRESS && (uintptr_t)address < BEYOND_ADDRESS;
}
void *address_of_device_globals(void) { return (void *)FIRST_ADDRESS; }

static int take_bytes_locked(size_t size_bytes) {
    if (size_bytes > device.total_bytes - device.context_bytes - used_bytes) return 0;
    used_bytes += size_bytes;
    if (used_bytes > peak_bytes) peak_bytes = used_bytes;
    return 1;
}

int take_bytes(size_t size_bytes) {
    pthread_mutex_lock(&lock);
    int taken = take_bytes_locked(size_bytes);
    pthread_mutex_unlock(&lock);
    return taken;
}

void give_bytes(size_t size_bytes) {
    pthread_mutex_lock(&lock);
    used_bytes -= size_bytes;
    pthread_mutex_unlock(&lock);
}

uintptr_t reserve_mapped_range(size_t size_bytes) {
    static uintptr_t next = FIRST_MAPPED;
    pthread_mutex_lock(&lock);
    uintptr_t start = next;
    next += round_up(size_bytes, GIB) + GIB; /* a gap, so that neighbours never touch */
    pthread_mutex_unlock(&lock);
    return start;
}

cudaError_t cudaMalloc(void **address, size_t size_bytes) {
    static uintptr_t next = FIRST_ADDRESS + GRANULE;
    *address = NULL;
    pthread_mutex_lock(&lock);
    if (take_bytes_locked(size_bytes)) {
        *address = (void *)next;
        add_range(&allocations, next, size_bytes);
        next += round_up(size_bytes ? size_bytes : 1, GRANULE);
    }
    size_t used_now_bytes = used_bytes;
    pthread_mutex_unlock(&lock);
    if (device.trace_memory)
        fprintf(stderr, "[null driver] malloc %zu -> %p, used %zu\n", size_bytes, *address, used_now_bytes);
    return *address ? cudaSuccess : cudaErrorMemoryAllocation;
}

cudaError_t cudaFree(void *address) {
    if (!address) return cudaSuccess; /* the usual way to say "make a context now" */
    size_t size_bytes = 0;
    pthread_mutex_lock(&lock);
    int found = remove_range(&allocations, (uintptr_t)address, &size_bytes);
    used_bytes -= size_bytes;
    size_t used_now_bytes = used_bytes;
    pthread_mutex_unlock(&lock);
    if (device.trace_memory)
        fprintf(stderr, "[null driver] free %zu at %p, used %zu\n", size_bytes, address, used_now_bytes);
    return found ? cudaSuccess : cudaErrorInvalidValue;
}

/* In stream order is at once: nothing that was queued before is still running. */
cudaError_t cudaMallocAsync(void **address, size_t size_bytes, cudaStream_t stream) {
    return cudaMalloc(address, size_bytes);
}
cudaError_t cudaFreeAsync(void *address, cudaStream_t stream) { return cudaFree(address); }

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes) {
    *total_bytes = device.total_bytes;
    *free_bytes = device.total_bytes - device.context_bytes - used_bytes;
    return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *address) {
    memset(attributes, 0, sizeof *attributes);
    if (is_device_address(address)) {
        attributes->type = cudaMemoryTypeDevice;
        attributes->devicePointer = (void *)address;
    } else if (is_pinned_address(address)) {
        attributes->type = cudaMemoryTypeHost;
        attributes->devicePointer = attributes->hostPointer = (void *)address;
    } else {
        attributes->type = cudaMemoryTypeUnregistered;
        attributes->device = -2; /* cudaInvalidDeviceId */
        attributes->hostPointer = (void *)address;
    }
    return cudaSuccess;
}

/* For checks, through ctypes: bytes of the card in use now, and at most so far. */
size_t nullcuda_used_bytes(void) { return used_bytes; }
size_t nullcuda_peak_bytes(void) { return peak_bytes; }
