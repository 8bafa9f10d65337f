/* Page-locked host memory, and copies between host and device. */
#include "null_device.h"
#include "ranges.h"
#include <pthread.h>
#include <string.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct ranges pinned;

static void pin(void *address, size_t size_bytes) {
    pthread_mutex_lock(&lock);
    add_range(&pinned, (uintptr_t)address, size_bytes ? size_bytes : 1);
    pthread_mutex_unlock(&lock);
}
static int unpin(void *address) {
    size_t size_bytes;
    pthread_mutex_lock(&lock);
    int found = remove_range(&pinned, (uintptr_t)address, &size_bytes);
    pthread_mutex_unlock(&lock);
    return found;
}
int is_pinned_address(const void *address) {
    pthread_mutex_lock(&lock);
    int found = lies_in_a_range(&pinned, (uintptr_t)address);
    pthread_mutex_unlock(&lock);
    return found;
}

cudaError_t cudaHostAlloc(void **address, size_t size_bytes, unsigned flags) {
    *address = calloc(1, size_bytes ? size_bytes : 1);
    if (!*address) return cudaErrorMemoryAllocation;
    pin(*address, size_bytes);
    return cudaSuccess;
}
cudaError_t cudaMallocHost(void **address, size_t size_bytes) {
    return cudaHostAlloc(address, size_bytes, 0);
}
cudaError_t cudaFreeHost(void *address) {
    if (!address) return cudaSuccess;
    if (!unpin(address)) return cudaErrorInvalidValue;
    free(address);
    return cudaSuccess;
}
cudaError_t cudaHostRegister(void *address, size_t size_bytes, unsigned flags) {
    pin(address, size_bytes);
    return cudaSuccess;
}
cudaError_t cudaHostUnregister(void *address) {
    return unpin(address) ? cudaSuccess : cudaErrorHostMemoryNotRegistered;
}

/* What comes from the device is zeros (so tensor.item() is 0), what goes there is lost,
 * and what stays on the host is really copied. */
static void copy_bytes(void *to, const void *from, size_t size_bytes) {
    if (is_device_address(to)) return;
    if (is_device_address(from)) memset(to, 0, size_bytes);
    else memmove(to, from, size_bytes);
}
cudaError_t cudaMemcpy(void *to, const void *from, size_t size_bytes, enum cudaMemcpyKind kind) {
    copy_bytes(to, from, size_bytes);
    return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size_bytes, enum cudaMemcpyKind kind,
                            cudaStream_t stream) {
    copy_bytes(to, from, size_bytes);
    return cudaSuccess;
}
cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                              size_t height, enum cudaMemcpyKind kind, cudaStream_t stream) {
    for (size_t row = 0; row < height; row++)
        copy_bytes((char *)to + row * to_pitch, (const char *)from + row * from_pitch, width);
    return cudaSuccess;
}
