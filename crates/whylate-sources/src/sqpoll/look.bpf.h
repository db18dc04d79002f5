/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Iterators over all submission threads and a process's rings. A reader gets one record after another. */
#pragma once

enum {
	/* ANON_INODE_FS_MAGIC (include/uapi/linux/magic.h) */
	ANON_INODE_FS = 0x09041934,
	REGISTERED_RINGS = 16,
	/* Maximum number of reads of a record that changes. */
	LOOK_TRIES = 8,
};

enum record_kind {
	RECORD_THREAD = 1,
	RECORD_RING,
};

struct thread_record {
	/* enum record_kind */
	u32 kind;
	u32 cpu;
	/* Identifies the thread for its rings. */
	u64 task;
	u64 now_ns;
	u64 run_delay_ns;
	/* The current wait, which is not counted in it yet. */
	u64 waiting_ns;
	u64 runtime_ns;
	/* Tick count; the length of a tick follows from two reads. */
	u64 jiffies;
	u32 allowed_cpus;
	u32 _unused;
	char process[16];
	struct sq_thread thread;
};

struct ring_record {
	/* enum record_kind */
	u32 kind;
	/* Descriptor, or index of a registered ring. */
	u32 fd;
	/* Identifies the ring, however many descriptors it has: its memory may be reused, but not its inode number. */
	u64 ring;
	u64 inode;
	u64 task;
	s64 work_time_us;
	u32 tgid;
	u32 flags;
	u32 idle_jiffies;
	s32 bound_cpu;
	u32 sq_head;
	u32 sq_tail;
	u32 cq_head;
	u32 cq_tail;
	u32 sq_entries;
	u32 cq_entries;
	u8 is_registered;
	u8 polls_network;
	u8 _unused[6];
};

/* Never holds data: puts the types that user space shares into the skeleton. */
struct {
	struct thread_record thread_record;
	struct ring_record ring_record;
	enum record_kind record_kind;
	enum sq_limits sq_limits;
	enum uring_setup uring_setup;
	enum sample_limits sample_limits;
	enum sq_lost sq_lost;
} layouts = {};

/* Returns the ring of a file; NULL for other files. */
static __always_inline struct io_ring_ctx *ring_of(struct file *file)
{
	char name[16] = {};

	if (BPF_CORE_READ(file, f_inode, i_sb, s_magic) != ANON_INODE_FS)
		return NULL;
	bpf_probe_read_kernel_str(name, sizeof(name), BPF_CORE_READ(file, f_path.dentry, d_name.name));
	if (!begins_with(name, "[io_uring]", sizeof("[io_uring]")))
		return NULL;
	return BPF_CORE_READ(file, private_data);
}

static __always_inline void write_ring(struct seq_file *seq, struct file *file, struct io_ring_ctx *ctx, u32 tgid, u32 fd,
				       bool is_registered)
{
	struct ring_record record = { .kind = RECORD_RING, .fd = fd, .tgid = tgid, .is_registered = is_registered };
	struct io_sq_data *sqd = BPF_CORE_READ(ctx, sq_data);
	struct io_rings *rings = BPF_CORE_READ(ctx, rings);

	record.flags = BPF_CORE_READ(ctx, flags);
	if (!(record.flags & IORING_SETUP_SQPOLL) || !sqd)
		return;
	record.ring = (u64)ctx;
	record.inode = BPF_CORE_READ(file, f_inode, i_ino);
	record.task = (u64)BPF_CORE_READ(sqd, thread);
	record.work_time_us = sq_work_time_us(sqd);
	record.idle_jiffies = BPF_CORE_READ(sqd, sq_thread_idle);
	record.bound_cpu = BPF_CORE_READ(sqd, sq_cpu);
	record.sq_head = BPF_CORE_READ(rings, sq.head);
	record.sq_tail = BPF_CORE_READ(rings, sq.tail);
	record.cq_head = BPF_CORE_READ(rings, cq.head);
	record.cq_tail = BPF_CORE_READ(rings, cq.tail);
	record.sq_entries = BPF_CORE_READ(ctx, sq_entries);
	record.cq_entries = BPF_CORE_READ(ctx, cq_entries);
	record.polls_network = ring_polls_network(ctx);
	bpf_seq_write(seq, &record, sizeof(record));
}

/* Takes a record, as of its `now_ns`. Returns false if it changed concurrently. */
static __noinline bool take_thread_once(struct thread_record *record, struct task_struct *task, struct sq_thread *thread)
{
	u32 version = *(volatile u32 *)&thread->version;

	barrier();
	__builtin_memcpy(&record->thread, thread, sizeof(*thread));
	record->run_delay_ns = task_run_delay_ns(task);
	record->now_ns = bpf_ktime_get_ns();
	/* A sleeping thread may have a stamp too. */
	record->waiting_ns = task->__state ? 0 : without_sleep(thread, task_waiting_ns(task), record->now_ns);
	barrier();
	return !(version & 1) && version == *(volatile u32 *)&thread->version;
}

/* The verifier of 6.1 rejects clang's code for this loop unless it is unrolled. */
static __always_inline void take_thread(struct thread_record *record, struct task_struct *task, struct sq_thread *thread)
{
#pragma unroll
	for (u32 tries = 0; tries < LOOK_TRIES; tries++) {
		if (take_thread_once(record, task, thread))
			break;
	}
}

/* Too large for the stack. Written by one read at a time. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, struct thread_record);
} thread_record_of_look SEC(".maps");

static __always_inline void write_thread(struct seq_file *seq, struct task_struct *task)
{
	struct thread_record *record;
	struct sq_thread *thread;
	u32 zero = 0;

	thread = get_or_add_thread(task, bpf_ktime_get_ns(), task->on_cpu);
	record = bpf_map_lookup_elem(&thread_record_of_look, &zero);
	if (!thread || !record)
		return;
	record->kind = RECORD_THREAD;
	record->cpu = task->thread_info.cpu;
	record->task = (u64)task;
	record->allowed_cpus = task->nr_cpus_allowed;
	record->jiffies = bpf_jiffies64();
	record->runtime_ns = task->se.sum_exec_runtime;
	bpf_core_read(record->process, sizeof(record->process), &task->group_leader->comm);
	take_thread(record, task, thread);
	bpf_seq_write(seq, record, sizeof(*record));
}

/* Iterates over all threads: submission threads, and rings registered by threads, which need no descriptor (6.3). */
SEC("iter/task")
int look_at_threads(struct bpf_iter__task *ctx)
{
	struct seq_file *seq = ctx->meta->seq;
	struct task_struct *task = ctx->task;
	struct io_uring_task *io_uring;

	if (!task)
		return 0;
	if (task->flags & PF_IO_WORKER) {
		if (is_sq_thread(task))
			write_thread(seq, task);
		return 0;
	}
	io_uring = task->io_uring;
	if (!io_uring)
		return 0;
	for (u32 i = 0; i < REGISTERED_RINGS; i++) {
		struct file *file = NULL;
		struct io_ring_ctx *ring;

		bpf_core_read(&file, sizeof(file), &io_uring->registered_rings[i]);
		ring = file ? ring_of(file) : NULL;
		if (ring)
			write_ring(seq, file, ring, task->tgid, i, true);
	}
	return 0;
}

/* Iterates over the descriptors of a process. */
SEC("iter/task_file")
int look_at_rings(struct bpf_iter__task_file *ctx)
{
	struct task_struct *task = ctx->task;
	struct file *file = ctx->file;
	struct io_ring_ctx *ring;

	if (!task || !file)
		return 0;
	ring = ring_of(file);
	if (ring)
		write_ring(ctx->meta->seq, file, ring, task->tgid, ctx->fd, false);
	return 0;
}
