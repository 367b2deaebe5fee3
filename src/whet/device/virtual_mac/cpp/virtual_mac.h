// A virtual Mac: PyTorch's `mps` device on a Linux CPU build, simulated over host memory. No Metal, no Apple GPU.
//
// The Linux build of PyTorch has the MPS dispatch keys and the torch.mps bindings, but nothing behind them. These files
// put something there: an allocator with Apple's limits (memory.cpp), generator, guard and hooks (device.cpp), kernels
// that compute on the CPU over the same bytes (kernels.cpp, boxed.cpp), and the door for Python (module.cpp).
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <unordered_set>
#include <vector>

namespace virtual_mac {

inline constexpr c10::DeviceType kMps = c10::DeviceType::MPS;
inline constexpr c10::DispatchKeySet kMpsKeys(c10::DispatchKey::MPS);
inline c10::Device mps_device() { return c10::Device(kMps, 0); }

// What is being simulated. Set by install(); read everywhere.
struct Settings {
  bool is_available = false;
  size_t recommended_bytes = 0;  // Metal's recommendedMaxWorkingSetSize
  size_t max_buffer_bytes = 0;   // Metal's maxBufferLength
  bool has_fallback = false;     // PYTORCH_ENABLE_MPS_FALLBACK
  unsigned macos_major = 15, macos_minor = 0;
  std::string torch_commit;
  std::unordered_set<std::string> native_operators;  // "name.overload" with an MPS kernel in this torch
};
Settings& settings();

// What happened.
struct Counters {
  std::atomic<int64_t> num_syncs{0};
  std::mutex mutex;
  std::map<std::string, int64_t> fallbacks;  // guarded by mutex
};
Counters& counters();

// memory.cpp
struct MemoryNumbers {
  int64_t allocated, peak, reserved, num_allocations;
};
c10::DeviceAllocator& allocator();
MemoryNumbers memory_numbers();
size_t driver_bytes();                      // heaps and what is held by others
void set_held_by_others(size_t bytes);      // e.g. MPSGraph's own buffers
void set_high_watermark(double ratio);      // torch.mps.set_per_process_memory_fraction
void forget_watermarks();                   // the next allocation reads the environment again
void reset_peak();

// device.cpp
at::Generator default_generator();
// A CPU generator for the next draw of an mps generator; the default one if none is given.
at::Generator next_draw(const std::optional<at::Generator>& of);

// kernels.cpp
void check_dtype(at::ScalarType dtype);
at::Tensor cpu_alias(const at::Tensor& tensor);    // the same bytes, as a CPU tensor
at::Tensor on_cpu(const at::Tensor& tensor);       // cpu_alias of an mps tensor, anything else as it is
at::Tensor to_mps(const at::Tensor& cpu_tensor);   // a new mps tensor with these values and strides

// boxed.cpp
void compute_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack);
void always_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack);
void register_native_kernels(const std::vector<std::string>& operators);

}  // namespace virtual_mac
