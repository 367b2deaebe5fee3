// Simulated faults: wrong results, GPU failures that raise no error, growing driver memory, and heat.
#include "virtual_mac.h"

#include <ATen/ATen.h>
#include <unistd.h>

#include <algorithm>
#include <optional>
#include <string_view>
#include <thread>
#include <unordered_set>

namespace virtual_mac {
namespace {

// Multiplies the results by a factor if the operator and the condition match.
class Miscompute final : public Fault {
 public:
  Miscompute(std::string operator_name, double relative_error, Condition when)
      : operator_name_(std::move(operator_name)), factor_(1 + relative_error), when_(std::move(when)) {}

  void after(const KernelCall& call, const std::vector<at::Tensor>& results) override {
    if (!call.is_of(operator_name_) || (when_ && !when_(call.inputs))) return;
    for (const at::Tensor& result : results)
      if (result.defined() && result.layout() == at::kStrided && (result.is_floating_point() || result.is_complex()))
        cpu_alias(result).mul_(factor_);
  }

 private:
  std::string operator_name_;
  double factor_;
  Condition when_;
};

// The text that Metal writes to stderr. Before torch 2.15, MPSStream.mm does not check the status of a command buffer,
// so Python continues.
constexpr std::string_view kMetalError =
    "Error: command buffer exited with error status.\n"
    "\tThe Metal Performance Shaders operations encoded on it may not have completed.\n"
    "\tError: \n\t(null)\n\t";
constexpr std::string_view kNoMemory = "Insufficient Memory (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)";
constexpr std::string_view kWatchdog =
    "Impacting Interactivity (0000000e:kIOGPUCommandBufferCallbackErrorImpactingInteractivity)";

// Since torch 2.15, the first error is raised at the next synchronization.
std::mutex pending_mutex;
std::optional<std::string> pending_error;  // guarded by pending_mutex

void fill_with_garbage(const at::Tensor& result) {
  if (!result.defined() || result.layout() != at::kStrided) return;
  at::Tensor garbage = at::empty(result.sizes(), result.options().device(at::kCPU));
  auto* bytes = static_cast<uint8_t*>(garbage.mutable_data_ptr());
  uint64_t drawn = 0x9E3779B97F4A7C15ull;
  for (size_t i = 0; i < garbage.nbytes(); ++i) {
    drawn = drawn * 6364136223846793005ull + 1442695040888963407ull;
    // A bool must be 0 or 1, because CPU kernels rely on it.
    bytes[i] = static_cast<uint8_t>(drawn >> 56) & (result.scalar_type() == at::kBool ? 1 : 0xFF);
  }
  cpu_alias(result).copy_(garbage);
}

class GpuFailure final : public Fault {
 public:
  GpuFailure(std::string operator_name, int64_t after_kernels, int64_t times, bool is_watchdog, bool raises)
      : operator_name_(std::move(operator_name)), reason_(is_watchdog ? kWatchdog : kNoMemory), raises_(raises),
        good_(after_kernels), bad_(times) {}

  void after(const KernelCall& call, const std::vector<at::Tensor>& results) override {
    if (!call.is_of(operator_name_) || good_-- > 0 || bad_-- <= 0) return;
    const std::string text = std::string(kMetalError) + std::string(reason_) + "\n";
    [[maybe_unused]] const auto written = ::write(STDERR_FILENO, text.data(), text.size());
    for (const at::Tensor& result : results) fill_with_garbage(result);
    std::lock_guard<std::mutex> lock(pending_mutex);
    if (raises_ && !pending_error) pending_error = std::string(reason_);
  }

 private:
  std::string operator_name_;
  std::string_view reason_;
  bool raises_;
  std::atomic<int64_t> good_, bad_;
};

class DriverGrowth final : public Fault {
 public:
  explicit DriverGrowth(size_t bytes) : bytes_(bytes) {}
  void after(const KernelCall&, const std::vector<at::Tensor>&) override { reserve_more(bytes_); }

 private:
  size_t bytes_;
};

class Heat;
std::mutex heats_mutex;
std::unordered_set<const Heat*> heats;  // all running ones, guarded by heats_mutex

// Slows down each kernel in proportion to its time.
class Heat final : public Fault {
 public:
  Heat(double full, double after, double over, bool in_seconds)
      : full_(full), after_(after), over_(over), in_seconds_(in_seconds) {
    std::lock_guard<std::mutex> lock(heats_mutex);
    heats.insert(this);
  }
  ~Heat() override {
    std::lock_guard<std::mutex> lock(heats_mutex);
    heats.erase(this);
  }

  double slowdown() const { return slowdown_; }

  void after(const KernelCall& call, const std::vector<at::Tensor>&) override {
    const double took = seconds_since(call.start);
    const double passed = in_seconds_ ? seconds_since(start_) : static_cast<double>(++num_kernels_);
    const double warm = passed <= after_ ? 0 : over_ <= 0 ? 1 : std::min(1.0, (passed - after_) / over_);
    slowdown_ = 1 + (full_ - 1) * warm;
    std::lock_guard<std::mutex> lock(mutex_);
    owed_ += (slowdown_ - 1) * took;
    // A sleep takes longer than a small kernel, so add up the delays of several kernels.
    if (owed_ < 1e-3) return;
    const auto slept_from = Clock::now();
    std::this_thread::sleep_for(std::chrono::duration<double>(owed_));
    owed_ -= seconds_since(slept_from);
  }

 private:
  double full_, after_, over_;
  bool in_seconds_;
  Clock::time_point start_ = Clock::now();
  std::atomic<int64_t> num_kernels_{0};
  std::atomic<double> slowdown_{1};
  std::mutex mutex_;
  double owed_ = 0;
};

}  // namespace

std::shared_ptr<Fault> miscompute(std::string operator_name, double relative_error, Condition when) {
  return std::make_shared<Miscompute>(std::move(operator_name), relative_error, std::move(when));
}

std::shared_ptr<Fault> gpu_failure(std::string operator_name, int64_t after_kernels, int64_t times, bool is_watchdog,
                                   bool raises) {
  return std::make_shared<GpuFailure>(std::move(operator_name), after_kernels, times, is_watchdog, raises);
}

std::shared_ptr<Fault> driver_growth(size_t bytes) { return std::make_shared<DriverGrowth>(bytes); }

void wait_for_gpu() {
  ++counters().num_syncs;
  std::optional<std::string> failed;
  {
    std::lock_guard<std::mutex> lock(pending_mutex);
    failed.swap(pending_error);
  }
  if (!failed) return;
  // The message is that of MPSStream.mm in torch 2.15.
  const std::string text = "MPS command buffer execution failed: " + *failed +
                           ". This error may have been asynchronously reported, so the stack trace below might be incorrect.";
  if (*failed == kNoMemory) throw c10::OutOfMemoryError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, text);
  throw c10::AcceleratorError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, 1, text);
}

std::shared_ptr<Fault> heat(double slowdown, double after, double over, bool in_seconds) {
  return std::make_shared<Heat>(slowdown, after, over, in_seconds);
}

double slowdown_now() {
  std::lock_guard<std::mutex> lock(heats_mutex);
  double largest = 1;
  for (const Heat* heat : heats) largest = std::max(largest, heat->slowdown());
  return largest;
}

}  // namespace virtual_mac
