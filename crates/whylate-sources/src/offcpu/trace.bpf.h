/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Every switch: a thread's stacks are taken when it gives its CPU up, and the time is counted when it has one again. Records of threads are
 * made by walks and for new threads, because nothing may be allocated for them while a run queue is locked.
 */
#pragma once

/* Bit of task_struct.__state of a thread that has ended. */
enum {
	TASK_DEAD = 0x80,
};

/* How many frames of the stack are those of taking it. */
static __always_inline u32 own_frames(const u64 *frames)
{
	u32 own = 0;

	for (u32 i = 0; i < OWN_FRAMES; i++) {
		for (u32 range = 0; range < OWN_CODE; range++) {
			if (frames[i] >= own_code_begin[range] && frames[i] < own_code_end[range])
				own = i + 1;
		}
	}
	return own;
}

/* Fills in the stacks of the thread that is running here; false where there is no room. */
static __always_inline bool take_stacks(struct task_struct *task, struct place_key *key)
{
	struct stack_value *kernel;
	struct scratch *scratch;
	u32 zero = 0, own;
	long bytes;

	scratch = bpf_map_lookup_elem(&scratch_of_cpu, &zero);
	if (!scratch)
		return false;
	bytes = bpf_get_task_stack(task, scratch->kernel.frames, sizeof(scratch->kernel.frames), 0);
	if (bytes > 0) {
		u32 length = (u64)bytes / 8;

		own = own_frames(scratch->kernel.frames);
		/* A stack begins with its number and its length, which are written over the last frame of our own. */
		barrier_var(own);
		own &= OWN_FRAMES;
		kernel = (void *)&scratch->kernel + own * 8;
		length = length > own ? length - own : 0;
		kernel->length = length < max_depth ? length : max_depth;
		if (length) {
			key->kernel_stack = number_of_stack(kernel, 0);
			if (!key->kernel_stack)
				return false;
		}
	}
	if (has_user_frames(task)) {
		enum user_end end = unwind_user(task, scratch, key->process, true);

		/* User space finds the rule for the next time. */
		key->user_end = end == USER_UNKNOWN ? USER_PARTLY : end;
		if (scratch->user.length) {
			key->user_stack = number_of_stack(&scratch->user, key->process);
			if (!key->user_stack)
				return false;
		}
	}
	return true;
}

static __always_inline void make_on_cpu_place(struct thread_record *record, const struct place_key *key)
{
	struct place_key on_cpu = *key;
	u32 place;

	on_cpu.state = STATE_ON_CPU;
	on_cpu.kernel_stack = 0;
	on_cpu.user_stack = 0;
	on_cpu.syscall = -1;
	on_cpu.in_iowait = 0;
	on_cpu.user_end = USER_COMPLETE;
	place = number_of_place(&on_cpu);
	record->on_cpu_place = place == PLACES ? 0 : place + 1;
	record->on_cpu_generation = generation + 1;
	if (place == PLACES)
		lose(LOST_PLACES);
}

/* The thread has no place until it leaves a CPU the next time. */
static __always_inline void give_up(struct thread_record *record, enum lost_reason reason, u64 now_ns)
{
	lose(reason);
	record->is_lost = true;
	record->generation = 0;
	take_time(record, now_ns);
}

static __always_inline void on_leaving(struct task_struct *task, enum thread_state state, bool has_ended, u64 now_ns)
{
	struct thread_record *record = bpf_task_storage_get(&record_by_thread, task, 0, 0);
	struct place_key key = {};
	u32 place;

	if (!record) {
		lose(LOST_THREADS);
		return;
	}
	record->is_skipped = !is_wanted(task, task->flags & PF_KTHREAD);
	if (record->is_skipped) {
		record->generation = 0;
		record->switches = switches_of(task);
		take_time(record, now_ns);
		return;
	}
	if (has_ended) {
		count_on_cpu(record, now_ns);
		return;
	}
	if (!fill_key(task, record, &key)) {
		give_up(record, LOST_PROCESSES, now_ns);
		return;
	}
	key.state = state;
	key.in_iowait = BPF_CORE_READ_BITFIELD(task, in_iowait);
	if (!key.is_kernel)
		key.syscall = syscall_of(task);
	if (!take_stacks(task, &key)) {
		give_up(record, LOST_STACKS, now_ns);
		return;
	}
	place = number_of_place(&key);
	if (place == PLACES) {
		give_up(record, LOST_PLACES, now_ns);
		return;
	}
	/* All that its time on CPUs is told by is also told of the place where it waits. */
	if (place != record->place || record->generation != generation + 1 || record->on_cpu_generation != generation + 1) {
		remember_ready_place(place, &key);
		make_on_cpu_place(record, &key);
	}
	count_on_cpu(record, now_ns);
	record->place = place;
	record->state = state;
	record->since_ns = now_ns;
	record->switches = switches_of(task);
	record->generation = generation + 1;
	record->is_known = true;
	record->is_unresolved = false;
	record->is_lost = false;
}

/* A thread waits for its first CPU without having left one: there is no stack yet. */
static __always_inline void count_new(struct task_struct *task, struct thread_record *record, u64 now_ns)
{
	u64 ns = take_time(record, now_ns);
	struct place_key key = {};
	u32 place;

	if (!(wanted_states & 1u << STATE_READY) || !is_wanted(task, task->flags & PF_KTHREAD))
		return;
	if (!fill_key(task, record, &key)) {
		lose(LOST_PROCESSES);
		return;
	}
	key.state = STATE_READY;
	place = number_of_place(&key);
	if (place == PLACES)
		lose(LOST_PLACES);
	else
		add(place, ns, 1, 1);
}

static __always_inline void on_arriving(struct task_struct *task, u64 now_ns)
{
	struct thread_record *record = bpf_task_storage_get(&record_by_thread, task, 0, 0);

	/* That there is no record is counted when it leaves. */
	if (!record || record->is_skipped)
		return;
	if (record->is_new)
		count_new(task, record, now_ns);
	else if (record->is_known && record->generation == generation + 1 && record->switches == switches_of(task))
		count_wait(task, record, now_ns, 1);
	else if (!record->is_lost)
		lose(LOST_UNSEEN);
	record->is_new = false;
	/* What was not seen is nobody's. */
	take_time(record, now_ns);
	record->state = STATE_ON_CPU;
	record->since_ns = now_ns;
}

static __always_inline bool is_traced(const struct task_struct *task)
{
	return task->pid && task->tgid != own_tgid && (!wanted_tgid || task->tgid == wanted_tgid);
}

/* Two stacks and three sums a switch: some microseconds, most of them for the kernel's stack. */
SEC("tp_btf/sched_switch")
int BPF_PROG(on_sched_switch, bool preempt, struct task_struct *prev, struct task_struct *next, unsigned int prev_state)
{
	struct scratch *scratch;
	u32 zero = 0;
	u64 now_ns;

	scratch = is_tracing ? bpf_map_lookup_elem(&scratch_of_cpu, &zero) : NULL;
	if (!scratch)
		return 0;
	now_ns = bpf_ktime_get_ns();
	if (is_traced(prev)) {
		/* A thread that is preempted may have been about to sleep. */
		scratch->state = state_of_bits(prev, preempt ? 0 : prev_state);
		on_leaving(prev, scratch->state, prev_state & TASK_DEAD, now_ns);
	}
	if (is_traced(next))
		on_arriving(next, now_ns);
	return 0;
}

SEC("tp_btf/task_newtask")
int BPF_PROG(on_task_newtask, struct task_struct *task)
{
	struct thread_record *record;

	if (!is_tracing || !is_traced(task))
		return 0;
	record = bpf_task_storage_get(&record_by_thread, task, 0, BPF_LOCAL_STORAGE_GET_F_CREATE);
	if (!record) {
		lose(LOST_THREADS);
		return 0;
	}
	record->counted_ns = bpf_ktime_get_ns();
	record->is_new = true;
	return 0;
}
