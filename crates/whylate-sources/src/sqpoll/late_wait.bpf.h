/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* A submission thread's wait for a CPU, with who had it meanwhile. */
#pragma once

struct late_wait {
	u64 runnable_ns;
	u64 running_ns;
	u32 tid;
	u32 tgid;
	u32 cpu;
	u32 _unused;
	char process[16];
	struct window window;
};

/* From which wait on; 0: none is explained. */
const volatile u64 explain_over_ns = 0;

/* Too large for the stack; the program that writes it has interrupts off. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, struct late_wait);
} wait_to_send SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	/* User space makes it larger where waits are explained. */
	__uint(max_entries, 4096);
} late_waits SEC(".maps");

static __noinline int explain_wait(struct task_struct *task, u64 waited_ns, u64 now_ns)
{
	struct late_wait *late;
	u32 zero = 0, count;
	u64 size;

	late = bpf_map_lookup_elem(&wait_to_send, &zero);
	if (!late)
		return 0;
	late->runnable_ns = since(now_ns, waited_ns);
	late->running_ns = now_ns;
	late->tid = task->pid;
	late->tgid = task->tgid;
	late->cpu = bpf_get_smp_processor_id();
	bpf_core_read(late->process, sizeof(late->process), &task->group_leader->comm);
	count = copy_window(&late->window, late->runnable_ns, now_ns);
	if (count > WINDOW_INTERVALS)
		count = WINDOW_INTERVALS;
	size = sizeof(*late) - (WINDOW_INTERVALS - count) * sizeof(struct interval);
	if (size > sizeof(*late))
		return 0;
	if (bpf_ringbuf_output(&late_waits, late, size, 0))
		lose(SQ_LOST_LATE_EVENTS);
	return 0;
}
