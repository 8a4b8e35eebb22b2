// An accelerator that is made of threads, for `offload_on_threads.py`: what a GPU does with streams, and no more.
//
// - A stream is a queue with a thread of its own. Recording an event, waiting for one and copies to and from pinned
//   memory go into the queue, and the host goes on. A copy takes a random time.
// - Any other operation runs on the host, when everything before it in the current stream is over.
// - Memory belongs to the stream that it was allocated for, which overwrites it with 0xFF (NaN) when it is freed, and
//   gives it out again to whoever asks for the same size on the same stream.
// - There are two devices, with threads of autograd of their own, and pinned memory that can be told from other.
#include <ATen/EmptyTensor.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_cpu_dispatch.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/view_cpu_dispatch.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <torch/extension.h>

#include <random>

#include "threads_streams.h"

namespace {

constexpr double MOST_MICROSECONDS = 600;  // of a copy
constexpr int FREED = 0xFF;

// Memory of the devices

using Owner = std::tuple<size_t, int, int64_t>;  // bytes, device, stream
struct Block {
  void* start;
  Owner owner;
};
int64_t allocated[DEVICES], peak[DEVICES];

void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  auto [nbytes, device, stream] = block->owner;
  queue(device, stream).add([start = block->start, nbytes = nbytes] { memset(start, FREED, nbytes); });
  std::lock_guard<std::mutex> lock(everything);
  allocated[device] -= nbytes;
  forever<std::map<Owner, std::vector<void*>>>()[block->owner].push_back(block->start);
  delete block;
}
void free_nothing(void*) {}

struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t nbytes) override {
    int device = current_device;
    if (nbytes == 0) return {nullptr, nullptr, &free_nothing, Device(KIND, device)};
    Owner owner{nbytes, device, current_stream[device]};
    std::lock_guard<std::mutex> lock(everything);
    auto& free = forever<std::map<Owner, std::vector<void*>>>()[owner];
    void* start = nullptr;
    if (free.empty()) {
      start = aligned_alloc(64, (nbytes + 63) / 64 * 64);
      memset(start, FREED, nbytes);
    } else {
      start = free.back();
      free.pop_back();
    }
    allocated[device] += nbytes;
    peak[device] = std::max(peak[device], allocated[device]);
    return {start, new Block{start, owner}, &free_block, Device(KIND, device)};
  }
  void copy_data(void* to, const void* from, size_t nbytes) const override { default_copy_data(to, from, nbytes); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, Stream) override { TORCH_CHECK(false, "nothing here may need it"); }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocated_bytes[0].current = allocated[device];
    stats.allocated_bytes[0].peak = peak[device];
    return stats;
  }
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex device) override { peak[device] = allocated[device]; }
};
DeviceMemory& device_memory = forever<DeviceMemory>();

// Pinned memory of the host

using Pinned = std::map<char*, size_t>;
bool is_pinned(const void* pointer) {
  std::lock_guard<std::mutex> lock(everything);
  for (auto& [start, nbytes] : forever<Pinned>())
    if (pointer >= start && pointer < start + nbytes) return true;
  return false;
}
void unpin(void* start) {  // as torch's own, which waits for the copies that were noted
  for (int device = 0; device < DEVICES; ++device)
    for (auto* one : queues_of(device)) one->wait_until_done();
  std::lock_guard<std::mutex> lock(everything);
  forever<Pinned>().erase(static_cast<char*>(start));
  free(start);
}
struct PinnedMemory final : at::HostAllocator {
  c10::DataPtr allocate(size_t nbytes) override {
    auto* start = static_cast<char*>(aligned_alloc(4096, (nbytes + 4095) / 4096 * 4096));
    memset(start, FREED, nbytes);
    std::lock_guard<std::mutex> lock(everything);
    forever<Pinned>()[start] = nbytes;
    return {start, start, &unpin, Device(c10::DeviceType::CPU)};
  }
  void copy_data(void* to, const void* from, size_t nbytes) const override { default_copy_data(to, from, nbytes); }
  bool record_event(void*, void*, Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};
PinnedMemory& pinned_memory = forever<PinnedMemory>();

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return DEVICES; }
  void setCurrentDevice(DeviceIndex device) const override { current_device = device; }
  DeviceIndex getCurrentDevice() const override { return current_device; }
  DeviceIndex exchangeDevice(DeviceIndex device) const override { return std::exchange(current_device, device); }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return exchangeDevice(device); }
  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
};
bool registered = [] {
  c10::SetAllocator(KIND, &device_memory, 1);
  at::setHostAllocator(KIND, &pinned_memory);
  at::RegisterPrivateUse1HooksInterface(&forever<Hooks>());
  return true;
}();

// Operations

at::Tensor on_host(const at::Tensor& tensor) {  // the same memory, for the processor's own code
  auto options = tensor.options().device(at::kCPU);
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), options);
}
at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(device.value_or(Device(KIND, current_device)));
  c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(size, &device_memory, keys, c10::dtype_or_default(dtype), format);
}
at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(device.value_or(Device(KIND, current_device)));
  c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(size, stride, &device_memory, keys, c10::dtype_or_default(dtype));
}
at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (from.numel() == 0) return to;
  bool out = from.device().type() == KIND, in = to.device().type() == KIND;
  auto& stream = queue(stream_of((out ? from : to).device().index()));
  auto source = on_host(from), destination = on_host(to);
  if (from.is_conj()) source = source.conj();
  if (from.is_neg()) source = source._neg_view();
  if (non_blocking && out != in && is_pinned((out ? to : from).data_ptr())) {
    thread_local std::mt19937 random{std::random_device{}()};
    auto pause = std::chrono::duration<double, std::micro>(
        std::uniform_real_distribution<>(0, MOST_MICROSECONDS)(random));
    stream.add([source, destination, pause] {
      std::this_thread::sleep_for(pause);
      c10::InferenceMode no_versions;
      destination.copy_(source);
    });
  } else {
    stream.wait_until_done();
    destination.copy_(source);
  }
  return to;
}
at::Tensor copy_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}
const at::Tensor& resize(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  auto nbytes = at::detail::computeStorageNbytesContiguous(sizes, self.dtype().itemsize(), self.storage_offset());
  if (nbytes > self.storage().nbytes()) {
    TORCH_CHECK(self.storage().nbytes() == 0, "only empty tensors grow here");
    c10::DeviceGuard guard(self.device());
    self.storage().set_data_ptr_noswap(device_memory.allocate(nbytes));
    self.storage().set_nbytes(nbytes);
  }
  self.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return self;
}
at::Scalar item(const at::Tensor& self) {
  queue(stream_of(self.device().index())).wait_until_done();
  return on_host(self).item();
}
void any_other(const c10::OperatorHandle& operation, torch::jit::Stack* stack) {
  for (int device = 0; device < DEVICES; ++device) queue(stream_of(device)).wait_until_done();
  at::native::cpu_fallback(operation, stack);
}

using Sizes = c10::SymIntArrayRef;
at::Tensor as_strided(const at::Tensor& self, Sizes size, Sizes stride, std::optional<c10::SymInt> offset) {
  return at::cpu::as_strided_symint(self, size, stride, offset);
}
at::Tensor view(const at::Tensor& self, Sizes size) { return at::cpu::view_symint(self, size); }
at::Tensor reshape_alias(const at::Tensor& self, Sizes size, Sizes stride) {
  return at::cpu::_reshape_alias_symint(self, size, stride);
}
at::Tensor& set_storage(at::Tensor& self, at::Storage storage) { return at::cpu::set_(self, storage); }
at::Tensor& set_all(at::Tensor& self, at::Storage storage, c10::SymInt offset, Sizes size, Sizes stride) {
  return at::cpu::set__symint(self, storage, offset, size, stride);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_and_resize);
  library.impl("_local_scalar_dense", &item);
  library.impl("resize_", &resize);
  library.impl("as_strided", &as_strided);
  library.impl("view", &view);
  library.impl("_reshape_alias", &reshape_alias);
  library.impl("set_.source_Storage", &set_storage);
  library.impl("set_.source_Storage_storage_offset", &set_all);
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&any_other>());
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {}
