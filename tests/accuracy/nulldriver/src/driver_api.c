/* The driver API, libcuda.so.1.
 *
 * PyTorch reaches the driver through cudaGetDriverEntryPointByVersion (virtual_memory.c).
 * What comes here are kernels compiled while the program runs, by NVRTC for some
 * element-wise ops and by Triton for a few ops of torch 2.14 and later: they really are
 * compiled, then loaded and launched into nothing. All other functions that the wheel's
 * cuda.h declares are generated stubs that succeed.
 */
#include <stddef.h>

enum { CU_SUCCESS = 0, CU_ERROR_NOT_FOUND = 500 };

/* From libnullcuda.so, which is always loaded first. Both APIs number attributes alike. */
extern int cudaDeviceGetAttribute(int *value, int attribute, int ordinal);
extern int cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes);
extern int cudaDriverGetVersion(int *version);

/* Stands for the one context and for every module and function. */
#define HANDLE ((void *)0x1000)

int cuInit(unsigned flags) { return CU_SUCCESS; }
int cuDriverGetVersion(int *version) { return cudaDriverGetVersion(version); }
int cuDeviceGetCount(int *count) {
    *count = 1;
    return CU_SUCCESS;
}
int cuDeviceGet(int *device, int ordinal) {
    *device = 0;
    return CU_SUCCESS;
}
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    return cudaDeviceGetAttribute(value, attribute, device);
}
int cuMemGetInfo_v2(size_t *free_bytes, size_t *total_bytes) {
    return cudaMemGetInfo(free_bytes, total_bytes);
}

/* The context exists from the start and is always the current one. */
int cuCtxGetCurrent(void **context) {
    *context = HANDLE;
    return CU_SUCCESS;
}
int cuCtxGetDevice(int *device) {
    *device = 0;
    return CU_SUCCESS;
}
int cuCtxPopCurrent_v2(void **context) {
    if (context) *context = HANDLE;
    return CU_SUCCESS;
}
int cuDevicePrimaryCtxRetain(void **context, int device) {
    *context = HANDLE;
    return CU_SUCCESS;
}
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    *flags = 0;
    *active = 1;
    return CU_SUCCESS;
}

int cuModuleLoadData(void **module, const void *image) {
    *module = HANDLE;
    return CU_SUCCESS;
}
int cuModuleLoadDataEx(void **module, const void *image, unsigned count, void *options, void *values) {
    *module = HANDLE;
    return CU_SUCCESS;
}
int cuModuleGetFunction(void **function, void *module, const char *name) {
    *function = HANDLE;
    return CU_SUCCESS;
}
int cuFuncGetAttribute(int *value, int attribute, void *function) {
    enum { MAX_THREADS_PER_BLOCK = 0 };
    *value = attribute == MAX_THREADS_PER_BLOCK ? 1024 : 0; /* no registers, no spills */
    return CU_SUCCESS;
}
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, void *function, int block_size, size_t shared_bytes) {
    *blocks = 1;
    return CU_SUCCESS;
}
int cuOccupancyMaxActiveClusters(int *clusters, void *function, const void *configuration) {
    *clusters = 1;
    return CU_SUCCESS;
}
int cuPointerGetAttribute(void **value, int attribute, unsigned long long pointer) {
    *value = (void *)pointer; /* Triton asks for the address as the device sees it */
    return CU_SUCCESS;
}

int cuGetErrorName(int error, const char **text) {
    *text = "null driver";
    return CU_SUCCESS;
}
int cuGetErrorString(int error, const char **text) {
    *text = "null driver";
    return CU_SUCCESS;
}

/* There are no more functions than these: who asks for private tables goes on without. */
int cuGetExportTable(const void **table, const void *id) {
    *table = NULL;
    return CU_ERROR_NOT_FOUND;
}
int cuGetProcAddress(const char *name, void **function, int version, unsigned long long flags) {
    *function = NULL;
    return CU_ERROR_NOT_FOUND;
}
int cuGetProcAddress_v2(const char *name, void **function, int version, unsigned long long flags, int *status) {
    enum { SYMBOL_NOT_FOUND = 1 };
    *function = NULL;
    if (status) *status = SYMBOL_NOT_FOUND;
    return CU_ERROR_NOT_FOUND;
}
