/* Virtual memory management of the driver API, which expandable segments use.
 *
 * PyTorch asks the runtime for these functions by name. A segment reserves a range of
 * addresses once, then creates pages and maps them; of all this, only creating and
 * releasing pages changes how much memory is in use. Mapping is a call that succeeds.
 */
#include "null_device.h"
#include <stdio.h>
#include <string.h>

enum { CU_SUCCESS = 0, CU_ERROR_OUT_OF_MEMORY = 2 };
typedef unsigned long long cu_value; /* CUdeviceptr, CUmemGenericAllocationHandle */

static int address_reserve(cu_value *start, size_t size_bytes, size_t alignment, cu_value wanted, cu_value flags) {
    *start = reserve_mapped_range(size_bytes);
    return CU_SUCCESS;
}

/* A handle is its own record: the number of granules below, a serial number above. */
#define GRANULE_BITS 32

static int create_pages(cu_value *handle, size_t size_bytes, const void *properties, cu_value flags) {
    static cu_value serial = 0;
    if (!take_bytes(size_bytes)) return CU_ERROR_OUT_OF_MEMORY;
    cu_value number = __atomic_add_fetch(&serial, 1, __ATOMIC_RELAXED);
    *handle = number << GRANULE_BITS | size_bytes / GRANULE;
    if (device.trace_memory) fprintf(stderr, "[null driver] create pages of %zu\n", size_bytes);
    return CU_SUCCESS;
}

static int release_pages(cu_value handle) {
    size_t size_bytes = (handle & (((cu_value)1 << GRANULE_BITS) - 1)) * GRANULE;
    give_bytes(size_bytes);
    if (device.trace_memory) fprintf(stderr, "[null driver] release pages of %zu\n", size_bytes);
    return CU_SUCCESS;
}

static int allocation_granularity(size_t *granularity, const void *properties, int option) {
    *granularity = GRANULE;
    return CU_SUCCESS;
}

/* PyTorch asks here about remote access and fabric handles only: no to both. */
static int no_such_attribute(int *value, int attribute, int ordinal) {
    *value = 0;
    return CU_SUCCESS;
}

static int current_context(void **context) {
    *context = (void *)0x1000;
    return CU_SUCCESS;
}

void *virtual_memory_function(const char *name) {
    static const struct {
        const char *name;
        void *function;
    } FUNCTIONS[] = {
        {"cuMemAddressReserve", (void *)address_reserve},
        {"cuMemCreate", (void *)create_pages},
        {"cuMemRelease", (void *)release_pages},
        {"cuMemGetAllocationGranularity", (void *)allocation_granularity},
        {"cuDeviceGetAttribute", (void *)no_such_attribute},
        {"cuCtxGetCurrent", (void *)current_context},
    };
    for (size_t i = 0; i < sizeof FUNCTIONS / sizeof *FUNCTIONS; i++)
        if (!strcmp(name, FUNCTIONS[i].name)) return FUNCTIONS[i].function;
    return NULL;
}

static int succeed(void) { return CU_SUCCESS; }

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                             unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *result) {
    void *known = virtual_memory_function(name);
    *function = known ? known : (void *)succeed;
    if (result) *result = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}
cudaError_t cudaGetDriverEntryPoint(const char *name, void **function, unsigned long long flags,
                                    enum cudaDriverEntryPointQueryResult *result) {
    return cudaGetDriverEntryPointByVersion(name, function, 0, flags, result);
}
