// The CUDA driver, loaded when the program runs: it is built without a GPU, a driver or a CUDA toolkit, from cuda.h alone.
#pragma once

#include <cuda.h>
#include <dlfcn.h>

#include <stdexcept>
#include <string>

// The name behind a function's name: cuda.h makes cuMemAlloc a macro for cuMemAlloc_v2.
#define DRIVER_TEXT(name) #name
#define DRIVER_SYMBOL(name) DRIVER_TEXT(name)
#define DRIVER_FUNCTION(member, name) decltype(&name) member = symbol<decltype(&name)>(DRIVER_SYMBOL(name))

class Driver {
  static void* library() {
    static void* const loaded = dlopen("libcuda.so.1", RTLD_NOW);
    if (loaded == nullptr) throw std::runtime_error(std::string("no NVIDIA driver: ") + dlerror());
    return loaded;
  }

  template <typename Function>
  static Function symbol(const char* name) {
    void* const found = dlsym(library(), name);
    if (found == nullptr) throw std::runtime_error(std::string("the NVIDIA driver is too old: it has no ") + name);
    return reinterpret_cast<Function>(found);
  }

 public:
  DRIVER_FUNCTION(init, cuInit);
  DRIVER_FUNCTION(version, cuDriverGetVersion);
  DRIVER_FUNCTION(error_name, cuGetErrorName);
  DRIVER_FUNCTION(device, cuDeviceGet);
  DRIVER_FUNCTION(attribute, cuDeviceGetAttribute);
  DRIVER_FUNCTION(retain_context, cuDevicePrimaryCtxRetain);
  DRIVER_FUNCTION(set_context, cuCtxSetCurrent);
  DRIVER_FUNCTION(load_module, cuModuleLoadData);
  DRIVER_FUNCTION(function, cuModuleGetFunction);
  DRIVER_FUNCTION(set_function, cuFuncSetAttribute);
  DRIVER_FUNCTION(allocate, cuMemAlloc);
  DRIVER_FUNCTION(to_device, cuMemcpyHtoD);
  DRIVER_FUNCTION(from_device, cuMemcpyDtoH);
  DRIVER_FUNCTION(launch, cuLaunchKernel);
  DRIVER_FUNCTION(synchronize, cuCtxSynchronize);

  // Throws unless a call of the driver succeeded.
  void check(CUresult status, const std::string& what) const {
    if (status == CUDA_SUCCESS) return;
    const char* name = "an unknown error";
    error_name(status, &name);
    throw std::runtime_error(what + " failed: " + name);
  }
};
