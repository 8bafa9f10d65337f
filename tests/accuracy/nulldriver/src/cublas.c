/* cuBLAS and cuBLASLt: handles and descriptors exist, products are generated stubs.
 *
 * PyTorch allocates their workspaces itself, through its caching allocator, so the sizes
 * are the real ones.
 */
#include "null_device.h"
#include <string.h>

enum { CUBLAS_SUCCESS = 0 };

/* 13020 (CUDA 13.2) becomes 130200, cuBLAS's way to write version 13.2.0. */
#define CUBLAS_VERSION_NUMBER (10 * CUDART_VERSION)

int cublasCreate_v2(void **handle) {
    write_new_handle(handle);
    return CUBLAS_SUCCESS;
}
int cublasGetVersion_v2(void *handle, int *version) {
    *version = CUBLAS_VERSION_NUMBER;
    return CUBLAS_SUCCESS;
}
int cublasGetMathMode(void *handle, int *mode) {
    *mode = 0;
    return CUBLAS_SUCCESS;
}
int cublasGetPointerMode_v2(void *handle, int *mode) {
    *mode = 0;
    return CUBLAS_SUCCESS;
}

size_t cublasLtGetVersion(void) { return CUBLAS_VERSION_NUMBER; }
int cublasLtCreate(void **handle) {
    write_new_handle(handle);
    return CUBLAS_SUCCESS;
}
int cublasLtMatmulDescCreate(void **description, int compute_type, int scale_type) {
    write_new_handle(description);
    return CUBLAS_SUCCESS;
}
int cublasLtMatrixLayoutCreate(void **layout, int type, uint64_t rows, uint64_t columns, int64_t stride) {
    write_new_handle(layout);
    return CUBLAS_SUCCESS;
}
int cublasLtMatmulPreferenceCreate(void **preference) {
    write_new_handle(preference);
    return CUBLAS_SUCCESS;
}

/* cublasLtMatmulHeuristicResult_t; all zeros is "success, needs no workspace". */
struct heuristic_result {
    uint64_t algorithm[8];
    size_t workspace_bytes;
    int state;
    float waves;
    int reserved[4];
};

/* One algorithm is offered for every product. */
int cublasLtMatmulAlgoGetHeuristic(void *handle, void *description, void *a, void *b, void *c, void *d,
                                   void *preference, int requested, struct heuristic_result *results, int *found) {
    memset(results, 0, sizeof *results);
    *found = 1;
    return CUBLAS_SUCCESS;
}
