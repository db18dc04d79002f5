// SPDX-License-Identifier: MIT OR Apache-2.0
/*
 * usage: victim SECONDS
 *        victim SECONDS FILE
 *
 * With a file: reads it again and again, so that its pages fill the cgroup. Else: takes and returns memory, and prints for how long the
 * kernel has delayed this thread for reclaim, in ns (freepages_delay_total in Documentation/accounting/taskstats.rst of the kernel's
 * source). Delay accounting must be on when it starts.
 */
#include <fcntl.h>
#include <linux/genetlink.h>
#include <linux/taskstats.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { MAP_BYTES = 8 << 20, PAGE_BYTES = 4096 };

struct message {
	struct nlmsghdr header;
	struct genlmsghdr command;
	char attributes[4096];
};

/* Sends a command with one attribute, and returns the reply's attribute of a type. */
static struct nlattr *ask(int fd, struct message *message, int family, int command, int type, const void *value, int bytes, int wanted)
{
	struct nlattr *attribute = (struct nlattr *)message->attributes;
	long length;

	memset(message, 0, sizeof(*message));
	attribute->nla_type = type;
	attribute->nla_len = NLA_HDRLEN + bytes;
	memcpy((char *)attribute + NLA_HDRLEN, value, bytes);
	message->header.nlmsg_len = NLMSG_LENGTH(GENL_HDRLEN) + NLA_ALIGN(attribute->nla_len);
	message->header.nlmsg_type = family;
	message->header.nlmsg_flags = NLM_F_REQUEST;
	message->command.cmd = command;
	message->command.version = 1;
	if (send(fd, message, message->header.nlmsg_len, 0) < 0 || (length = recv(fd, message, sizeof(*message), 0)) < 0)
		return NULL;
	if (message->header.nlmsg_type == NLMSG_ERROR)
		return NULL;
	for (char *at = message->attributes; at + NLA_HDRLEN <= (char *)message + length;) {
		attribute = (struct nlattr *)at;
		/* The statistics are within another attribute. */
		if (attribute->nla_type == TASKSTATS_TYPE_AGGR_PID && wanted == TASKSTATS_TYPE_STATS) {
			at += NLA_HDRLEN;
			continue;
		}
		if (attribute->nla_type == wanted)
			return attribute;
		at += NLA_ALIGN(attribute->nla_len);
	}
	return NULL;
}

static unsigned long long reclaim_delay_ns(void)
{
	static struct message message;
	int fd = socket(AF_NETLINK, SOCK_RAW, NETLINK_GENERIC);
	__u32 pid = getpid();
	struct nlattr *found = ask(fd, &message, GENL_ID_CTRL, CTRL_CMD_GETFAMILY, CTRL_ATTR_FAMILY_NAME, TASKSTATS_GENL_NAME,
				   sizeof(TASKSTATS_GENL_NAME), CTRL_ATTR_FAMILY_ID);
	struct taskstats stats = {};

	if (found)
		found = ask(fd, &message, *(__u16 *)((char *)found + NLA_HDRLEN), TASKSTATS_CMD_GET, TASKSTATS_CMD_ATTR_PID, &pid, sizeof(pid),
			    TASKSTATS_TYPE_STATS);
	close(fd);
	if (!found) {
		fprintf(stderr, "the kernel has no taskstats\n");
		exit(3);
	}
	memcpy(&stats, (char *)found + NLA_HDRLEN, sizeof(stats));
	return stats.freepages_delay_total;
}

static double now(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return time.tv_sec + time.tv_nsec / 1e9;
}

static int fill(const char *path, double until)
{
	static char buffer[1 << 20];
	int fd = open(path, O_RDONLY);

	/* Pages that are in memory already are charged to another cgroup. */
	if (fd < 0 || fsync(fd) || posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED))
		return 1;
	while (now() < until)
		if (read(fd, buffer, sizeof(buffer)) <= 0 && lseek(fd, 0, SEEK_SET))
			return 1;
	return 0;
}

int main(int argc, char **argv)
{
	double until = now() + atof(argc > 1 ? argv[1] : "1");

	if (argc > 2)
		return fill(argv[2], until);

	while (now() < until) {
		char *memory = mmap(NULL, MAP_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

		if (memory == MAP_FAILED)
			return 1;
		for (int at = 0; at < MAP_BYTES; at += PAGE_BYTES)
			memory[at] = 1;
		munmap(memory, MAP_BYTES);
	}
	printf("%llu\n", reclaim_delay_ns());
	return 0;
}
