/* What the files of the preloaded library (libnullcuda.so) share.
 *
 * Internal names are hidden: the library comes first in every symbol search of the
 * process, and a variable called `device` must not answer for another library's.
 */
#pragma once
#include <cuda_runtime_api.h>
#include <stddef.h>
#include <stdint.h>

#define KIB ((size_t)1 << 10)
#define MIB ((size_t)1 << 20)
#define GIB ((size_t)1 << 30)

/* Device memory comes in granules of this size and alignment, as from a real driver. */
#define GRANULE (2 * MIB)

#pragma GCC visibility push(hidden)

/* The imitated card, read from the environment when the library is loaded. */
struct null_device {
    int major, minor;
    int sm_count, threads_per_sm, blocks_per_sm;
    size_t total_bytes, context_bytes;
    size_t shared_per_sm_bytes, shared_per_block_bytes; /* per block: after opting in */
    int trace_memory, trace_kernels;
};
extern struct null_device device;

/* Whether an address was handed out as device memory. */
int is_device_address(const void *address);

/* One page below all device memory, for what kernels declare as __device__ variables. */
void *address_of_device_globals(void);

/* Whether an address lies in page-locked host memory. */
int is_pinned_address(const void *address);

/* Account for device memory; taking fails (0) when the card is full. Thread-safe. */
int take_bytes(size_t size_bytes);
void give_bytes(size_t size_bytes);

/* Reserve an address range for mapped memory (expandable segments). */
uintptr_t reserve_mapped_range(size_t size_bytes);

/* Streams, events and descriptors only have to be distinct and not null. */
void write_new_handle(void *where);

/* The virtual memory function of the driver API with this name, or NULL. */
void *virtual_memory_function(const char *name);

static inline size_t round_up(size_t size, size_t step) {
    return (size + step - 1) / step * step;
}

#pragma GCC visibility pop
