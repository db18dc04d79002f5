// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * How late the functions of all hrtimers are called, by function and CPU, and how long they run. Those in softirqs are separate: they wait
 * for interrupts and softirqs. Timers of a CPU expire one after another, but interrupt a softirq's.
 */
#include "kernel_types.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>
#include "compat.bpf.h"
#include "lost.bpf.h"
#include "registers.bpf.h"
#include "ways.bpf.h"
#include "distribution.bpf.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

enum timer_limits {
	/* Maximum number of distinguished functions and CPUs. */
	MAX_TIMER_SERIES = 4096,
	/* Maximum number of timers with known periods; the least recently used one is evicted. */
	MAX_TIMERS = 8192,
	/* Number of steps of equal length, or multiples of it, that make a timer periodic. */
	PERIODIC_FROM = 3,
};

enum timers_lost {
	/* No room for a function on a CPU. */
	TIMERS_SERIES_FULL,
	/* No room for a value in a histogram. */
	TIMERS_BUCKETS_FULL,
	/* A function returned that was not seen being called: it ran when measuring started. */
	TIMERS_UNMATCHED,
	TIMERS_LOST_REASONS,
};

struct timer_key {
	u64 function;
	u32 cpu;
	u32 is_soft;
};

struct timer_series {
	/* ELEMENT_COUNTS, or as in elements.bpf.h. */
	u64 state;
	struct timer_key key;
	/* Period of the last periodic timer seen. */
	u64 period_ns;
	/* Periods that were over when a periodic timer's function was called. */
	u64 overruns;
	struct distribution latency;
	struct distribution runtime;
};

/* State of one timer. */
struct timer_state {
	/* Its due time, by its own clock. */
	u64 due_ns;
	/* Smallest step between due times of which others are multiples. */
	u64 period_ns;
	/* Number of such steps in a row. */
	u32 steps;
	u32 id;
	/* When its function was called; 0: it does not run. */
	u64 called_ns;
};

/* Never holds data: puts the types that user space shares into the skeleton. */
struct {
	struct timer_series timer_series;
	struct timer_key timer_key;
	enum timer_limits timer_limits;
	enum timers_lost timers_lost;
} layouts = {};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, MAX_TIMER_SERIES);
	__type(key, struct timer_key);
	__type(value, u32);
} timer_series_id_by_key SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, MAX_TIMER_SERIES);
	__type(key, u32);
	__type(value, struct timer_series);
} timer_series_by_id SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, MAX_TIMERS);
	__type(key, u64);
	__type(value, struct timer_state);
} state_by_timer SEC(".maps");

LOST_EVENTS(timers_lost, TIMERS_LOST_REASONS)

static __always_inline struct timer_key key_of(const struct hrtimer *timer)
{
	struct timer_key key = {
		.function = (u64)timer->function,
		.cpu = bpf_get_smp_processor_id(),
		.is_soft = bpf_core_field_exists(timer->is_soft) ? timer->is_soft : 0,
	};

	return key;
}

static __always_inline bool has_key(const struct timer_series *series, const struct timer_key *key)
{
	return series->key.function == key->function && series->key.cpu == key->cpu && series->key.is_soft == key->is_soft;
}

/* The order of the steps is that of elements.bpf.h. */
static __noinline u32 new_series(const struct timer_key *key)
{
	u32 id = take_element(&timer_series_by_id, MAX_TIMER_SERIES);
	struct timer_series *series = bpf_map_lookup_elem(&timer_series_by_id, &id);

	if (!id || !series)
		return 0;
	series->key = *key;
	if (!bpf_map_update_elem(&timer_series_id_by_key, key, &id, BPF_NOEXIST)) {
		store_in_order(&series->state, ELEMENT_COUNTS);
		return id;
	}
	/* A timer that interrupts this program may have created it. */
	__builtin_memset(&series->key, 0, sizeof(series->key));
	return_element(&timer_series_by_id, id);
	return 0;
}

/* Returns 0 if there is no room. */
static __always_inline u32 series_of(const struct timer_key *key)
{
	u32 *known = bpf_map_lookup_elem(&timer_series_id_by_key, key), id;
	struct timer_series *series;

	if (!known)
		return new_series(key);
	id = *known;
	series = bpf_map_lookup_elem(&timer_series_by_id, &id);
	return series && has_key(series, key) ? id : new_series(key);
}

static __always_inline void count(struct distribution *distribution, u64 value_ns)
{
	if (!distribution_add_rare(distribution, value_ns))
		lose(TIMERS_BUCKETS_FULL);
}

/*
 * Learns a timer's period. A timer rearmed for a multiple of its period, as by hrtimer_forward(), was late for those in between. A timer
 * rearmed for arbitrary times has no period.
 */
static __always_inline void learn_period(struct timer_state *state, u64 due_ns)
{
	u64 step_ns = since(due_ns, state->due_ns);

	if (state->due_ns && step_ns) {
		if (state->period_ns && step_ns % state->period_ns == 0) {
			state->steps++;
		} else {
			state->period_ns = step_ns;
			state->steps = 0;
		}
	}
	state->due_ns = due_ns;
}

SEC("tp_btf/hrtimer_expire_entry")
int BPF_PROG(on_hrtimer_expire_entry, struct hrtimer *timer)
{
	struct timer_state *state, fresh = {};
	u64 now_ns = bpf_ktime_get_ns(), address = (u64)timer;
	/* By its own clock, which may be CLOCK_REALTIME; the offset is to CLOCK_MONOTONIC. */
	u64 due_ns = timer->node.expires;
	u64 late_ns = since(now_ns, due_ns - BPF_CORE_READ(timer, base, offset));
	struct timer_key key = key_of(timer);
	struct timer_series *series;
	u32 id = series_of(&key);

	series = bpf_map_lookup_elem(&timer_series_by_id, &id);
	if (!id || !series) {
		lose(TIMERS_SERIES_FULL);
		return 0;
	}
	/* A timer with slack may expire before the end of it. */
	count(&series->latency, late_ns);
	state = bpf_map_lookup_elem(&state_by_timer, &address);
	if (!state) {
		bpf_map_update_elem(&state_by_timer, &address, &fresh, BPF_ANY);
		state = bpf_map_lookup_elem(&state_by_timer, &address);
		if (!state)
			return 0;
	}
	learn_period(state, due_ns);
	if (state->steps >= PERIODIC_FROM) {
		series->period_ns = state->period_ns;
		__sync_fetch_and_add(&series->overruns, late_ns / state->period_ns);
	}
	state->id = id;
	state->called_ns = bpf_ktime_get_ns();
	return 0;
}

SEC("tp_btf/hrtimer_expire_exit")
int BPF_PROG(on_hrtimer_expire_exit, struct hrtimer *timer)
{
	u64 now_ns = bpf_ktime_get_ns(), address = (u64)timer;
	struct timer_state *state = bpf_map_lookup_elem(&state_by_timer, &address);
	struct timer_key key = key_of(timer);
	struct timer_series *series;
	u32 id;

	if (!state || !state->called_ns) {
		lose(TIMERS_UNMATCHED);
		return 0;
	}
	id = state->id;
	series = bpf_map_lookup_elem(&timer_series_by_id, &id);
	/* User space may have freed it since the function was called. */
	if (!series || !has_key(series, &key)) {
		id = series_of(&key);
		series = bpf_map_lookup_elem(&timer_series_by_id, &id);
	}
	if (id && series)
		count(&series->runtime, since(now_ns, state->called_ns));
	else
		lose(TIMERS_SERIES_FULL);
	state->called_ns = 0;
	return 0;
}
