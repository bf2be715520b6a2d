// A stub of libcuda.so.1 for machines without a GPU: device memory is ordinary memory, and a launch writes down what it was given.
//
// Environment: STUB_CAPABILITY ("90"), STUB_LAUNCH (the file that gets a launch), STUB_BYTES (size of the kernel's struct of parameters).
#include <cuda.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

namespace {
std::string entry, image;
int shared_limit = 0;
int number(const char* name) { return std::atoi(std::getenv(name)); }
}  // namespace

extern "C" {
CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int* version) { return *version = 13000, CUDA_SUCCESS; }
CUresult cuGetErrorName(CUresult, const char** name) { return *name = "CUDA_ERROR_OF_THE_STUB", CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice* device, int ordinal) { return *device = ordinal, CUDA_SUCCESS; }
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice) {
  const int capability = number("STUB_CAPABILITY");
  *value = attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR ? capability / 10 : capability % 10;
  return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice) { return *context = reinterpret_cast<CUcontext>(1), CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }
CUresult cuModuleLoadData(CUmodule* module, const void* data) {
  if (std::memcmp(data, "\x7f" "ELF", 4) != 0) return CUDA_ERROR_INVALID_IMAGE;
  return *module = reinterpret_cast<CUmodule>(1), CUDA_SUCCESS;
}
CUresult cuModuleGetFunction(CUfunction* function, CUmodule, const char* name) {
  return entry = name, *function = reinterpret_cast<CUfunction>(1), CUDA_SUCCESS;
}
CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int value) { return shared_limit = value, CUDA_SUCCESS; }
CUresult cuMemAlloc(CUdeviceptr* memory, size_t bytes) { return *memory = reinterpret_cast<CUdeviceptr>(std::calloc(bytes, 1)), CUDA_SUCCESS; }
CUresult cuMemcpyHtoD(CUdeviceptr to, const void* from, size_t bytes) {
  return std::memcpy(reinterpret_cast<void*>(to), from, bytes), CUDA_SUCCESS;
}
CUresult cuMemcpyDtoH(void* to, CUdeviceptr from, size_t bytes) {
  return std::memcpy(to, reinterpret_cast<void*>(from), bytes), CUDA_SUCCESS;
}
CUresult cuLaunchKernel(CUfunction, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned, unsigned, unsigned shared, CUstream,
                        void** parameters, void**) {
  std::FILE* file = std::fopen(std::getenv("STUB_LAUNCH"), "wb");
  std::fprintf(file, "%s %u %u %u %u %u %d\n", entry.c_str(), x, y, z, threads, shared, shared_limit);
  std::fwrite(parameters[0], 1, number("STUB_BYTES"), file);
  std::fclose(file);
  return CUDA_SUCCESS;
}
CUresult cuCtxSynchronize() { return CUDA_SUCCESS; }
}
