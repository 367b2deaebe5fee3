// The parts of a device besides kernels: generator, device guard, events, and the hooks behind torch.mps.
#include "virtual_mac.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/DeviceAccelerator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/detail/MPSHooksInterface.h>
#include <ATen/detail/XPUHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstring>

namespace virtual_mac {

Settings& settings() {
  static auto* one = new Settings();
  return *one;
}

Counters& counters() {
  static auto* one = new Counters();
  return *one;
}

namespace {

// A counter-based generator, like that of MPS. Its state of 44 bytes holds the seed and the number of draws. The random
// numbers differ from those on a Mac, because each draw seeds a CPU generator with this pair.
class CountingGenerator final : public c10::GeneratorImpl {
 public:
  static constexpr int64_t kStateBytes = 44;  // 7 words of Philox state, the seed and the offset (MPSGeneratorImpl.h)
  static constexpr int64_t kSeedAt = 28, kOffsetAt = 36;

  explicit CountingGenerator(uint64_t seed) : c10::GeneratorImpl{mps_device(), kMpsKeys}, seed_(seed) {}

  static c10::DeviceType device_type() { return kMps; }
  void set_current_seed(uint64_t seed) override { seed_ = seed, offset_ = 0; }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom(false));
    return seed_;
  }

  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.numel() == kStateBytes, "RNG state is wrong size");
    const auto* bytes = static_cast<const uint8_t*>(state.data());
    std::memcpy(&seed_, bytes + kSeedAt, sizeof seed_);
    std::memcpy(&offset_, bytes + kOffsetAt, sizeof offset_);
  }

  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    c10::Allocator* host = c10::GetAllocator(c10::kCPU);
    c10::Storage storage(c10::Storage::use_byte_size_t(), kStateBytes, host->allocate(kStateBytes), host, true);
    auto* bytes = static_cast<uint8_t*>(storage.mutable_data());
    std::memset(bytes, 0, kStateBytes);
    std::memcpy(bytes + kSeedAt, &seed_, sizeof seed_);
    std::memcpy(bytes + kOffsetAt, &offset_, sizeof offset_);
    auto tensor = c10::make_intrusive<c10::TensorImpl>(
        std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), caffe2::TypeMeta::Make<uint8_t>());
    tensor->set_sizes_contiguous({kStateBytes});
    return tensor;
  }

  CountingGenerator* clone_impl() const override {
    auto* copy = new CountingGenerator(seed_);
    copy->offset_ = offset_;
    return copy;
  }

  // splitmix64 gives unrelated seeds for adjacent offsets.
  uint64_t seed_of_next() const {
    uint64_t mixed = seed_ + 0x9E3779B97F4A7C15ull * (offset_ + 1);
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9ull;
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EBull;
    return mixed ^ (mixed >> 31);
  }

  at::Generator next() {
    std::lock_guard<std::mutex> lock(mutex_);
    const uint64_t seed = seed_of_next();
    ++offset_;
    return at::detail::createCPUGenerator(seed);
  }

 private:
  uint64_t seed_, offset_ = 0;
};

const at::Generator& the_default_generator() {
  static auto* one = new at::Generator(at::make_generator<CountingGenerator>(c10::default_rng_seed_val));
  return *one;
}

c10::Stream the_stream() { return c10::Stream(c10::Stream::DEFAULT, mps_device()); }

// There is one device with one stream, and all work is synchronous.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kMps; }
  c10::Device exchangeDevice(c10::Device) const override { return mps_device(); }
  c10::Device getDevice() const override { return mps_device(); }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return the_stream(); }
  c10::Stream getDefaultStream(c10::Device) const override { return the_stream(); }
  c10::Stream getNewStream(c10::Device, int = 0) const override { return the_stream(); }
  c10::Stream exchangeStream(c10::Stream) const override { return the_stream(); }
  c10::DeviceIndex deviceCount() const noexcept override { return settings().is_available ? 1 : 0; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override { wait_for_gpu(); }
  void synchronizeDevice(const c10::DeviceIndex) const override { wait_for_gpu(); }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}

  using Time = Clock::time_point;
  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = new Time();
    *static_cast<Time*>(*event) = Clock::now();
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Time*>(event); }
  void synchronizeEvent(void*) const override { wait_for_gpu(); }
  double elapsedTime(void* start, void* end, const c10::DeviceIndex) const override {
    return std::chrono::duration<double, std::milli>(*static_cast<Time*>(end) - *static_cast<Time*>(start)).count();
  }
};
C10_REGISTER_GUARD_IMPL(MPS, Guard)

}  // namespace

// The hooks that torch.mps, torch.backends.mps and torch.accelerator call.
struct Hooks final : at::MPSHooksInterface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return settings().is_available; }
  bool hasMPS() const override { return settings().is_available; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isOnMacOSorNewer(unsigned major, unsigned minor) const override {
    return std::make_pair(settings().macos_major, settings().macos_minor) >= std::make_pair(major, minor);
  }
  c10::DeviceIndex deviceCount() const override { return settings().is_available ? 1 : 0; }
  c10::Device getDeviceFromPtr(void*) const override { return mps_device(); }
  bool isPinnedPtr(const void*) const override { return false; }

  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return the_default_generator(); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::make_generator<CountingGenerator>(c10::default_rng_seed_val);
  }

  c10::Allocator* getMPSDeviceAllocator() const override { return &allocator(); }
  void emptyCache() const override {
    allocator().emptyCache();
    clear_graph_cache();  // since torch 2.13
  }
  size_t getCurrentAllocatedMemory() const override { return static_cast<size_t>(memory_numbers().allocated); }
  size_t getDriverAllocatedMemory() const override { return driver_bytes(); }
  size_t getRecommendedMaxMemory() const override { return settings().recommended_bytes; }
  size_t getMaxBufferLength() const override { return settings().max_buffer_bytes; }
  void setMemoryFraction(double ratio) const override { set_high_watermark(ratio); }

  void deviceSynchronize() const override { wait_for_gpu(); }
  void commitStream() const override {}
  void profilerStartTrace(const std::string&, bool) const override {}
  void profilerStopTrace() const override {}

  uint32_t acquireEvent(bool) const override {
    std::lock_guard<std::mutex> lock(mutex_);
    events_.emplace(++last_event_, Guard::Time());
    return last_event_;
  }
  void releaseEvent(uint32_t event) const override {
    std::lock_guard<std::mutex> lock(mutex_);
    events_.erase(event);
  }
  void recordEvent(uint32_t event) const override {
    std::lock_guard<std::mutex> lock(mutex_);
    events_.at(event) = Clock::now();
  }
  void waitForEvent(uint32_t) const override {}
  void synchronizeEvent(uint32_t) const override { wait_for_gpu(); }
  bool queryEvent(uint32_t) const override { return true; }
  double elapsedTimeOfEvents(uint32_t start, uint32_t end) const override {
    std::lock_guard<std::mutex> lock(mutex_);
    return std::chrono::duration<double, std::milli>(events_.at(end) - events_.at(start)).count();
  }

 private:
  mutable std::mutex mutex_;
  mutable std::map<uint32_t, Guard::Time> events_;
  mutable uint32_t last_event_ = 0;
};

bool is_accelerator() {
  try {
    return at::getAccelerator() == kMps;
  } catch (const c10::Error&) {
    return false;  // "Cannot have both MPS and cuda."
  }
}

at::Generator default_generator() { return the_default_generator(); }

at::Generator next_draw(const std::optional<at::Generator>& of) {
  const at::Generator& generator = of && of->defined() ? *of : the_default_generator();
  return static_cast<CountingGenerator*>(generator.unsafeGetGeneratorImpl())->next();
}

uint64_t seed_of_next_draw() {
  return static_cast<CountingGenerator*>(the_default_generator().unsafeGetGeneratorImpl())->seed_of_next();
}

namespace {
// torch allows one kind of accelerator per build (DeviceAccelerator.cpp), and a build for CUDA, ROCm or XPU has already
// created its hooks when this extension is loaded. The hooks hold no data (CUDAHooksInterface.cpp), so replacing their
// vtable by that of the interface makes them behave as in a CPU build.
template <class Interface>
void hide(const Interface& hooks) {
  static const Interface of_cpu_build;
  if (hooks.isBuilt())
    std::memcpy(const_cast<void*>(static_cast<const void*>(&hooks)), static_cast<const void*>(&of_cpu_build), sizeof(void*));
}

const bool kIsReady = [] {
  c10::SetAllocator(kMps, &allocator());
  hide(at::detail::getCUDAHooks());
  hide(at::detail::getXPUHooks());
  return true;
}();
}  // namespace
}  // namespace virtual_mac

namespace at {
using VirtualMacHooks = virtual_mac::Hooks;
C10_REGISTER_CLASS(MPSHooksRegistry, MPSHooks, VirtualMacHooks)
}  // namespace at
