// A virtual Mac: PyTorch's `mps` device on a Linux build, simulated in host memory without Metal or an Apple GPU.
//
// Linux builds of PyTorch have the MPS dispatch keys and the torch.mps bindings, but no implementation. These files
// provide it: an allocator with Apple's limits (memory.cpp), the generator, guard and hooks (device.cpp), kernels that
// compute on the CPU in the same memory (kernels.cpp, computing.cpp, boxed.cpp, sparse.cpp), operators that MPS runs on
// the CPU or rejects (fallback.cpp), simulated faults (kernel_calls.cpp, faults.cpp), and the Python bindings
// (module.cpp).
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_set>
#include <vector>

namespace virtual_mac {

inline constexpr c10::DeviceType kMps = c10::DeviceType::MPS;
inline constexpr c10::DispatchKeySet kMpsKeys(c10::DispatchKey::MPS);
inline c10::Device mps_device() { return c10::Device(kMps, 0); }

// The properties of the simulated Mac, set by install().
struct Settings {
  bool is_available = false;
  size_t recommended_bytes = 0;  // Metal's recommendedMaxWorkingSetSize
  size_t max_buffer_bytes = 0;   // Metal's maxBufferLength
  bool has_fallback = false;     // PYTORCH_ENABLE_MPS_FALLBACK
  unsigned macos_major = 15, macos_minor = 0;
  std::string torch_commit;
  std::unordered_set<std::string> native_operators;  // "name.overload" of operators with an MPS kernel in this torch
};
Settings& settings();

using Clock = std::chrono::steady_clock;
inline double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// The cost of an operator that ran on the CPU.
struct Fallback {
  int64_t calls = 0;
  double seconds = 0;
};
struct Counters {
  std::atomic<int64_t> num_syncs{0}, num_kernels{0};
  std::mutex mutex;
  std::map<std::string, Fallback> fallbacks;  // guarded by mutex
};
Counters& counters();

// memory.cpp
struct MemoryNumbers {
  int64_t allocated, peak, reserved, num_allocations;
};
c10::DeviceAllocator& allocator();
MemoryNumbers memory_numbers();
size_t driver_bytes();                      // bytes of the heaps and of memory held outside of the allocator
void reserve_more(size_t bytes);            // adds unused heaps, until the cache is emptied
void hold_more(int64_t bytes);              // changes the memory held outside of the allocator by this amount
void kill_above(size_t bytes);              // sends SIGKILL above this usage; 0 means never
void set_high_watermark(double ratio);      // torch.mps.set_per_process_memory_fraction
void forget_watermarks();                   // the next allocation reads the environment again
void reset_peak();

// device.cpp
bool is_accelerator();  // whether torch regards the virtual device as its accelerator
at::Generator default_generator();
// Returns a CPU generator for the next draw of an mps generator, or of the default mps generator if none is given.
at::Generator next_draw(const std::optional<at::Generator>& of);
uint64_t seed_of_next_draw();

// kernels.cpp
void check_dtype(at::ScalarType dtype);
at::Tensor cpu_alias(const at::Tensor& tensor);    // a CPU tensor with the same memory
at::Tensor on_cpu(const at::Tensor& tensor);       // cpu_alias of an mps tensor, or any other tensor unchanged
at::Tensor to_mps(const at::Tensor& cpu_tensor);   // a new mps tensor with these values and strides

// sparse.cpp
at::Tensor sparse_on_cpu(const at::Tensor& tensor);           // a CPU tensor with the same indices and values
at::Tensor sparse_to_mps(const at::Tensor& cpu_tensor);
void replace_sparse(const at::Tensor& tensor, const at::Tensor& cpu_tensor);

// boxed.cpp
std::string name_of(const c10::OperatorHandle& op);           // "add.Tensor"
void compute_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack);
void register_kernels(const std::vector<std::string>& operators, bool is_sparse);

// fallback.cpp
void adaptive_pool(const c10::OperatorHandle& op, torch::jit::Stack* stack);

// kernel_calls.cpp
// One call of a kernel. Construct it when the kernel starts, and call done() with the results.
class KernelCall {
 public:
  KernelCall(const std::string& full_name, const std::vector<at::Tensor>& inputs);
  void done(const std::vector<at::Tensor>& results) const;
  bool is_of(const std::string& operator_name) const { return operator_name.empty() || operator_name == name; }

  std::string name;  // "mm", without its overload
  const std::vector<at::Tensor>& inputs;
  Clock::time_point start;
};

struct GraphCache {
  int64_t entries, bytes;
};
GraphCache graph_cache();
void clear_graph_cache();
void hold_per_graph(int64_t bytes);  // sets the host memory that is really allocated for each new graph

// A simulated fault. It is called after every kernel, and may change the results.
struct Fault {
  virtual ~Fault() = default;
  virtual void after(const KernelCall& call, const std::vector<at::Tensor>& results) = 0;
};
int64_t start_fault(std::shared_ptr<Fault> fault);
void end_fault(int64_t fault);

// faults.cpp
using Condition = std::function<bool(const std::vector<at::Tensor>& inputs)>;
std::shared_ptr<Fault> miscompute(std::string operator_name, double relative_error, Condition when);
std::shared_ptr<Fault> gpu_failure(std::string operator_name, int64_t after_kernels, int64_t times, bool is_watchdog,
                                   bool raises);
std::shared_ptr<Fault> driver_growth(size_t bytes);  // bytes per kernel
void wait_for_gpu();  // counts a synchronization, and throws the pending error of a failed kernel
std::shared_ptr<Fault> heat(double slowdown, double after, double over, bool in_seconds);
double slowdown_now();  // largest current slowdown factor of all heat faults, or 1 without heat

}  // namespace virtual_mac
