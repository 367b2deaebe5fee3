// A model of PyTorch's MPSHeapAllocator. It rounds sizes up to pages, has three pools of heaps (8 MiB, 32 MiB, 1 GiB)
// and separate heaps for larger buffers, and fails above the high watermark. Based on MPSAllocator.h and
// MPSAllocator.mm in torch 2.13.
#include "virtual_mac.h"

#include <array>
#include <csignal>
#include <cstdlib>
#include <unordered_map>

namespace virtual_mac {
namespace {

using c10::CachingAllocator::format_size;

constexpr size_t kMiB = 1048576;
constexpr size_t kPage = 16384;
constexpr double kHighest = 2.0;

struct Pool {
  size_t largest_buffer, heap_bytes;
  size_t used = 0, reserved = 0;
};

size_t round_up(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

double ratio_from_environment(const char* name, double otherwise) {
  const char* text = std::getenv(name);
  return text ? std::strtod(text, nullptr) : otherwise;
}

class HostMemory final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, &release, mps_device()};
    const size_t size = round_up(bytes, kPage);
    std::lock_guard<std::mutex> lock(mutex_);
    read_watermarks();
    TORCH_CHECK(bytes < settings().max_buffer_bytes, "Invalid buffer size: ", format_size(bytes));
    Pool& pool = pool_of(size);
    if (is_over_limit(pool, size)) drop_cached_heaps();
    if (is_over_limit(pool, size)) refuse(size);
    pool.reserved += growth(pool, size);
    pool.used += size;
    kill_if_above();
    void* data = nullptr;
    TORCH_CHECK(posix_memalign(&data, kPage, size) == 0, "the host has no memory left for the virtual Mac");
    sizes_[data] = size;
    allocated_.increase(size);
    ++num_allocations_;
    return {data, data, &release, mps_device()};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
  bool initialized() override { return true; }
  void recordStream(const c10::DataPtr&, c10::Stream) override {}

  void emptyCache(c10::MempoolId_t = {0, 0}) override {
    std::lock_guard<std::mutex> lock(mutex_);
    drop_cached_heaps();
  }

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    std::lock_guard<std::mutex> lock(mutex_);
    constexpr auto all = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocated_bytes[all] = allocated_;
    stats.reserved_bytes[all].current = static_cast<int64_t>(reserved());
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {
    std::lock_guard<std::mutex> lock(mutex_);
    allocated_.reset_accumulated();
  }
  void resetPeakStats(c10::DeviceIndex) override {
    std::lock_guard<std::mutex> lock(mutex_);
    allocated_.reset_peak();
  }

  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) override {
    const size_t all = settings().recommended_bytes, used = driver();
    return {all > used ? all - used : 0, all};
  }

  size_t driver() {
    std::lock_guard<std::mutex> lock(mutex_);
    read_watermarks();
    return reserved() + held_by_others_;
  }

  MemoryNumbers numbers() {
    std::lock_guard<std::mutex> lock(mutex_);
    return {allocated_.current, allocated_.peak, static_cast<int64_t>(reserved()), num_allocations_};
  }

  void reserve_more(size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    pools_.back().reserved += bytes;
  }

  void hold_more(int64_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    held_by_others_ += static_cast<size_t>(bytes);
    kill_if_above();
  }

  void kill_above(size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    kill_above_ = bytes;
    kill_if_above();
  }

  void forget_watermarks() {
    std::lock_guard<std::mutex> lock(mutex_);
    knows_watermarks_ = false;
  }

  void set_high_watermark(double ratio) {
    std::lock_guard<std::mutex> lock(mutex_);
    read_watermarks();
    TORCH_CHECK(ratio >= 0 && ratio <= kHighest, "invalid high watermark ratio ", ratio);
    high_ = ratio;
  }

 private:
  static void release(void* data);

  // As on a Mac, the environment is read when the allocator is first used. Invalid values are rejected then.
  void read_watermarks() {
    if (knows_watermarks_) return;
    const double high = ratio_from_environment("PYTORCH_MPS_HIGH_WATERMARK_RATIO", 1.7);
    TORCH_CHECK(high >= 0 && high <= kHighest, "invalid high watermark ratio ", high);
    const double low = ratio_from_environment("PYTORCH_MPS_LOW_WATERMARK_RATIO", 1.4);
    TORCH_CHECK(low >= 0 && low <= (high > 0 ? high : kHighest), "invalid low watermark ratio ", low);
    high_ = high;
    knows_watermarks_ = true;
  }

  Pool& pool_of(size_t size) {
    for (Pool& pool : pools_)
      if (size <= pool.largest_buffer) return pool;
    return pools_.back();
  }

  size_t reserved() const {
    size_t sum = 0;
    for (const Pool& pool : pools_) sum += pool.reserved;
    return sum;
  }

  static size_t growth(const Pool& pool, size_t size) {
    const size_t needed = round_up(pool.used + size, pool.heap_bytes);
    return needed > pool.reserved ? needed - pool.reserved : 0;
  }

  size_t limit() const {
    return high_ == 0 ? SIZE_MAX : static_cast<size_t>(high_ * static_cast<double>(settings().recommended_bytes));
  }

  // MPS checks the size of the buffer, not that of a new heap for it, so a heap may exceed the limit.
  bool is_over_limit(const Pool& pool, size_t size) const {
    return reserved() + held_by_others_ + (growth(pool, size) ? size : 0) > limit();
  }

  void drop_cached_heaps() {
    for (Pool& pool : pools_) pool.reserved = round_up(pool.used, pool.heap_bytes);
  }

  // macOS kills a process that uses too much memory with SIGKILL.
  void kill_if_above() const {
    size_t used = held_by_others_;
    for (const Pool& pool : pools_) used += pool.used;
    if (kill_above_ > 0 && used > kill_above_) std::raise(SIGKILL);
  }

  [[noreturn]] void refuse(size_t size) const {
    TORCH_CHECK(false, "MPS backend out of memory (MPS allocated: ", format_size(reserved()), ", other allocations: ",
                format_size(held_by_others_), ", max allowed: ", format_size(limit()), "). Tried to allocate ",
                format_size(size), " on shared pool. Use PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 to disable upper limit",
                " for memory allocations (may cause system failure).");
  }

  std::mutex mutex_;
  std::array<Pool, 4> pools_{{{kMiB, 8 * kMiB}, {10 * kMiB - 1, 32 * kMiB}, {512 * kMiB - 1, 1024 * kMiB}, {SIZE_MAX, 2 * kMiB}}};
  std::unordered_map<void*, size_t> sizes_;
  c10::CachingAllocator::Stat allocated_;
  int64_t num_allocations_ = 0;
  size_t held_by_others_ = 0, kill_above_ = 0;
  double high_ = 1.7;
  bool knows_watermarks_ = false;
};

HostMemory& memory() {
  static auto* one = new HostMemory();  // never destroyed, because tensors may outlive static objects
  return *one;
}

void HostMemory::release(void* data) {
  if (data == nullptr) return;
  HostMemory& self = memory();
  std::lock_guard<std::mutex> lock(self.mutex_);
  auto found = self.sizes_.find(data);
  if (found != self.sizes_.end()) {
    self.allocated_.decrease(found->second);
    self.pool_of(found->second).used -= found->second;
    self.sizes_.erase(found);
  }
  std::free(data);
}

}  // namespace

c10::DeviceAllocator& allocator() { return memory(); }
MemoryNumbers memory_numbers() { return memory().numbers(); }
size_t driver_bytes() { return memory().driver(); }
void reserve_more(size_t bytes) { memory().reserve_more(bytes); }
void hold_more(int64_t bytes) { memory().hold_more(bytes); }
void kill_above(size_t bytes) { memory().kill_above(bytes); }
void set_high_watermark(double ratio) { memory().set_high_watermark(ratio); }
void forget_watermarks() { memory().forget_watermarks(); }
void reset_peak() { memory().resetPeakStats(0); }

}  // namespace virtual_mac
