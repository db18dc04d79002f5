// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * A softirq of known length: the kernel runs the callback of a bpf_timer in HRTIMER_SOFTIRQ of the CPU where the
 * timer was started (with PREEMPT_RT in the thread ktimers of that CPU).
 */
#include "kernel_types.h"
#include <bpf/bpf_helpers.h>
#include "disturbance.bpf.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

/* Delay of the timer. */
const volatile u64 lead_ns = 0;

/* Number of callbacks that have ended. */
u64 ended = 0;

struct timer_slot {
	struct bpf_timer timer;
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, struct timer_slot);
} timers SEC(".maps");

static int keep_softirq_busy(void *map, int *key, void *value)
{
	disturb();
	__sync_fetch_and_add(&ended, 1);
	return 0;
}

SEC("syscall")
int prepare_timer(void *context)
{
	u32 first = 0;
	struct timer_slot *slot = bpf_map_lookup_elem(&timers, &first);

	if (!slot)
		return 1;
	if (bpf_timer_init(&slot->timer, &timers, CLOCK_MONOTONIC))
		return 1;
	return bpf_timer_set_callback(&slot->timer, keep_softirq_busy) != 0;
}

SEC("syscall")
int start_timer(void *context)
{
	u32 first = 0;
	struct timer_slot *slot = bpf_map_lookup_elem(&timers, &first);

	if (!slot)
		return 1;
	if (!bpf_timer_start(&slot->timer, lead_ns, BPF_F_TIMER_CPU_PIN))
		return 0;
	/* Before 6.7 there is no such flag, and a timer is not migrated from a CPU that is not idle: this one is busy with this program. */
	return bpf_timer_start(&slot->timer, lead_ns, 0) != 0;
}
