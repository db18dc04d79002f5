/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The activation of each CPU's measured thread, shared by the programs and the thread. */
#pragma once

/* One activation of the measured thread of a CPU. */
struct activation {
	/* Set by the thread before it sleeps; the kernel's timer expires at the same time. */
	u64 due_ns;
	/* When the timer's handler was called; 0: not yet. */
	u64 irq_ns;
	/* When the thread ran, or was switched in if that is not known; 0: not yet. */
	u64 thread_ns;
	/* When the thread was last switched in before its timer expired. */
	u64 back_ns;
	/*
	 * Task of the timer, found by the programs, as user space may be in another PID namespace. An address, because
	 * reading the task_struct takes another cache line.
	 */
	u64 task;
	/* In whylate's PID namespace. */
	u32 tid;
	/* Whether a thread is measured on this CPU. */
	u32 is_measured;
	/* Thread and interrupt latencies from which a late event is sent; user space changes them. */
	u64 explain_over_ns;
	u64 explain_irq_over_ns;
	/* Fields above are used at each activation, with cold caches; those below only if causes are wanted. */
	/* Longest latency of an interrupt that found the CPU idle. */
	u64 max_from_idle_ns;
	u64 _unused[7];
};
_Static_assert(__builtin_offsetof(struct activation, max_from_idle_ns) == 64, "an activation takes more than one cache line");
_Static_assert(sizeof(struct activation) % 64 == 0, "activations of two CPUs share a cache line");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	/* User space sets it to the number of CPUs. */
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, struct activation);
} activation_by_cpu SEC(".maps");

static __always_inline struct activation *activation_here(void)
{
	u32 cpu = bpf_get_smp_processor_id();

	return bpf_map_lookup_elem(&activation_by_cpu, &cpu);
}
