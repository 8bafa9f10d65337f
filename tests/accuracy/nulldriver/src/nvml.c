/* The management library, libnvidia-ml.so.1.
 *
 * PyTorch counts devices with it and, when memory runs out, lists the processes on the
 * card for its message. That list must succeed and be empty: an error there would turn
 * torch.OutOfMemoryError into a failed assertion. Every other function that PyTorch may
 * look up is a generated stub that answers NVML_ERROR_NOT_SUPPORTED.
 */
#define HANDLE ((void *)0x1000)
enum { NVML_SUCCESS = 0 };

int nvmlInit_v2(void) { return NVML_SUCCESS; }
int nvmlShutdown(void) { return NVML_SUCCESS; }
int nvmlDeviceGetCount_v2(unsigned *count) {
    *count = 1;
    return NVML_SUCCESS;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    *device = HANDLE;
    return NVML_SUCCESS;
}
int nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **device) {
    *device = HANDLE;
    return NVML_SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses(void *device, unsigned *count, void *processes) {
    *count = 0;
    return NVML_SUCCESS;
}
int nvmlDeviceGetComputeRunningProcesses_v2(void *device, unsigned *count, void *processes) {
    *count = 0;
    return NVML_SUCCESS;
}
int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, void *processes) {
    *count = 0;
    return NVML_SUCCESS;
}

/* nvmlGpuFabricInfoV_t; asked before the first expandable segment. */
struct fabric_info {
    unsigned version;
    unsigned char cluster[16];
    unsigned status, clique;
    unsigned char state;
};
int nvmlDeviceGetGpuFabricInfoV(void *device, struct fabric_info *info) {
    enum { NOT_SUPPORTED = 0 };
    info->state = NOT_SUPPORTED; /* on no NVLink fabric */
    return NVML_SUCCESS;
}
