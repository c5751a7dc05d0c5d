// Tells a torch without CUDA that there are GPUs: it may then make tensors that say that they are on
// one. There is no memory and no kernel behind them, and all that was asked of a stream is done.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

#include <atomic>

namespace {

constexpr auto CUDA = c10::DeviceType::CUDA;
constexpr c10::DeviceIndex GPUS = 4;
std::atomic<c10::DeviceIndex> current{0};

struct Guard final : c10::impl::NoOpDeviceGuardImpl<CUDA> {
  c10::DeviceIndex deviceCount() const noexcept override { return GPUS; }
  c10::Device getDevice() const override { return {CUDA, current}; }
  c10::Device exchangeDevice(c10::Device device) const override {
    return {CUDA, device.has_index() ? current.exchange(device.index()) : current.load()};
  }
  void setDevice(c10::Device device) const override { exchangeDevice(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { exchangeDevice(device); }
  c10::Stream getStream(c10::Device device) const noexcept override {
    return c10::Stream(c10::Stream::DEFAULT, device);
  }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override { return stream; }
  void record(void**, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, c10::DeviceIndex) const noexcept override {}
  void synchronizeEvent(void*) const override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(c10::DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};

// The timer of DistributedDataParallel.
struct Timer final : c10d::Timer {
  explicit Timer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event, Event) override { return std::nullopt; }
};

}  // namespace

struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  c10::DeviceIndex deviceCount() const override { return GPUS; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return GPUS; }
  bool isPinnedPtr(const void*) const override { return false; }
};

// For simulated.py.
extern "C" {
int gpus() { return GPUS; }
int current_gpu() { return current; }
void set_gpu(int index) { current = static_cast<c10::DeviceIndex>(index); }
}

C10_REGISTER_GUARD_IMPL(CUDA, Guard);

namespace at {
using ::CUDAHooks;
REGISTER_CUDA_HOOKS(CUDAHooks);
}  // namespace at

namespace c10d {
C10_REGISTER_TYPED_CLASS(TimerRegistry, CUDA, ::Timer);
}  // namespace c10d
