// What a test can ask of the stand-in for the CUDA driver, beside the driver's own functions.
#pragma once

#include <cstdint>

extern "C" {
// With `on`, work given to streams waits until it is stepped, waited for or switched off again.
void standin_lag(int on);
// Gives work to a stream of a device; NULL is its default stream.
void standin_launch(int device, void* stream, void (*work)(void*), void* argument);
// What the stream `to` is given from now on comes after what `from` has been given.
void standin_pass(int device, void* from, void* to);
// Runs the next piece of work of one stream that can go on, by `choice`; 0 when there is none.
int standin_step(std::uint64_t choice);
// The n-th call of a function from now on fails (n = 1: the next); with -n that and all after it;
// 0 for none. 0 when there is no such function.
int standin_fail(const char* function, std::int64_t n);
// Calls fail at random, so many in a million; 0 for none.
void standin_fail_often(std::int64_t of_a_million, std::uint64_t seed);
// Memory of each device from now on.
void standin_set_bytes(std::int64_t bytes);
std::int64_t standin_used(int device);
std::int64_t standin_calls(const char* function);
// How many there are: "handles", "mappings", "reservations", "segments", "events".
std::int64_t standin_count(const char* what);
// Calls that no driver would forgive.
std::int64_t standin_faults(void);
}
