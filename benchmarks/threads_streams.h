// The streams and events of the device in `threads.cpp`.
#pragma once
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <thread>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

constexpr auto KIND = c10::DeviceType::PrivateUse1;
constexpr int DEVICES = 2;

std::mutex everything;  // guards the tables below; all of them outlive the threads, so they are never destroyed
template <class T> T& forever() {
  static T* it = new T;
  return *it;
}

// Streams

class Queue {
 public:
  Queue() { std::thread([this] { work(); }).detach(); }
  void add(std::function<void()> job) {
    std::lock_guard<std::mutex> lock(mutex_);
    jobs_.push_back(std::move(job));
    ++issued_;
    changed_.notify_all();
  }
  void wait_until_done() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this, goal = issued_] { return done_ >= goal; });
  }
  bool idle() {
    std::lock_guard<std::mutex> lock(mutex_);
    return done_ == issued_;
  }

 private:
  void work() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      changed_.wait(lock, [this] { return !jobs_.empty(); });
      auto job = std::move(jobs_.front());
      jobs_.pop_front();
      lock.unlock();
      job();
      lock.lock();
      ++done_;
      changed_.notify_all();
    }
  }
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> jobs_;
  long issued_ = 0, done_ = 0;
};

using Queues = std::map<std::pair<int, int64_t>, Queue*>;
thread_local int current_device = 0;
thread_local int64_t current_stream[DEVICES] = {};
std::atomic<int64_t> next_stream{1};

Stream stream_of(int device) { return Stream(Stream::UNSAFE, Device(KIND, device), current_stream[device]); }
int index_of(Device device) { return device.index() < 0 ? current_device : device.index(); }
Queue& queue(int device, int64_t stream) {
  std::lock_guard<std::mutex> lock(everything);
  auto*& found = forever<Queues>()[{device, stream}];
  if (!found) found = new Queue;
  return *found;
}
Queue& queue(Stream stream) { return queue(stream.device_index(), stream.id()); }
std::vector<Queue*> queues_of(int device) {
  std::lock_guard<std::mutex> lock(everything);
  std::vector<Queue*> found;
  for (auto& [key, one] : forever<Queues>())
    if (key.first == device) found.push_back(one);
  return found;
}

// Events: each recording is a mark of its own, so that an event can be recorded again while others wait for its last.

struct Mark {
  std::mutex mutex;
  std::condition_variable changed;
  bool reached = false;
  std::chrono::steady_clock::time_point at;
  void wait() {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [this] { return reached; });
  }
  bool is_reached() {
    std::lock_guard<std::mutex> lock(mutex);
    return reached;
  }
};
struct Event {
  std::mutex mutex;
  std::shared_ptr<Mark> last;
  std::shared_ptr<Mark> mark() {
    std::lock_guard<std::mutex> lock(mutex);
    return last;
  }
};
Event& event_of(void* event) { return *static_cast<Event*>(event); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return KIND; }
  Device getDevice() const override { return Device(KIND, current_device); }
  void uncheckedSetDevice(Device device) const noexcept override { current_device = index_of(device); }
  void setDevice(Device device) const override { uncheckedSetDevice(device); }
  Device exchangeDevice(Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  DeviceIndex deviceCount() const noexcept override { return DEVICES; }

  Stream getStream(Device device) const override { return stream_of(index_of(device)); }
  Stream getDefaultStream(Device device) const override {
    return Stream(Stream::DEFAULT, Device(KIND, index_of(device)));
  }
  Stream getNewStream(Device device, int = 0) const override {
    return Stream(Stream::UNSAFE, Device(KIND, index_of(device)), next_stream++);
  }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device); }
  Stream exchangeStream(Stream stream) const override {
    auto before = stream_of(stream.device_index());
    current_stream[stream.device_index()] = stream.id();
    return before;
  }
  bool queryStream(const Stream& stream) const override { return queue(stream).idle(); }
  void synchronizeStream(const Stream& stream) const override { queue(stream).wait_until_done(); }
  void synchronizeDevice(DeviceIndex device) const override {
    for (auto* one : queues_of(device)) one->wait_until_done();
  }
  bool isStreamCapturing(const Stream&) const override { return false; }

  void record(void** event, const Stream& stream, DeviceIndex device, c10::EventFlag) const override {
    TORCH_CHECK(device == -1 || device == stream.device_index(), "the event belongs to another device");
    if (!*event) *event = new Event;
    auto mark = std::make_shared<Mark>();
    {
      std::lock_guard<std::mutex> lock(event_of(*event).mutex);
      event_of(*event).last = mark;
    }
    queue(stream).add([mark] {
      std::lock_guard<std::mutex> lock(mark->mutex);
      mark->reached = true;
      mark->at = std::chrono::steady_clock::now();
      mark->changed.notify_all();
    });
  }
  void block(void* event, const Stream& stream) const override {
    if (event) queue(stream).add([mark = event_of(event).mark()] { mark->wait(); });
  }
  bool queryEvent(void* event) const override { return !event || event_of(event).mark()->is_reached(); }
  void synchronizeEvent(void* event) const override { event_of(event).mark()->wait(); }
  double elapsedTime(void* first, void* last, DeviceIndex) const override {
    auto from = event_of(first).mark(), to = event_of(last).mark();
    return std::chrono::duration<double, std::milli>(to->at - from->at).count();
  }
  void destroyEvent(void* event, DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

}  // namespace
