// A DeviceGuard for CUDA that does nothing: a torch built for CPUs has none, and asks for one for tensors on `cuda:0`.
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {
struct Registration {
  Registration() {
    static c10::impl::DeviceGuardImplRegistrar registrar(
        c10::DeviceType::CUDA, new c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>());
  }
} registration;
}  // namespace
