/* In place of a header that only the nvcc package ships and that the wheel's runtime
 * headers include: it attaches compiler keywords to declarations, none needed in C. */
#pragma once
#define CUDARTAPI
#define CUDARTAPI_CDECL
#define CUDA_CB
#define __annotate__(keyword)
#define __builtin_align__(bytes) __attribute__((aligned(bytes)))
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __constant__
#define __cudart_builtin__
#define __device__
#define __device_builtin__
#define __device_builtin_surface_type__
#define __device_builtin_texture_type__
#define __forceinline__ inline
#define __global__
#define __host__
#define __inline_hint__
#define __location__(keyword)
#define __managed__
#define __shared__
#define __specialization_static static
