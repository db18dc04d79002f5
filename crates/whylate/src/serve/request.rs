// SPDX-License-Identifier: MIT OR Apache-2.0
//! Requests and replies of HTTP/1.1.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use crate::render::metrics::{Form, Pages};

/// Maximum number of header fields.
const MAX_FIELDS: usize = 64;
/// Seconds of a profile or a report, if none are requested.
const DEFAULT_SECONDS: u32 = 10;
/// Maximum number of seconds of a profile or a report.
const MAX_SECONDS: u32 = 300;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    Get,
    Head,
    Post,
    Other,
}

/// The parts of a request that matter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    pub method: Method,
    pub path: String,
    query: String,
    pub accept: String,
    /// Each `Host` field, and the host of the target's address.
    hosts: Vec<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    Ok,
    BadRequest,
    Forbidden,
    NotFound,
    MethodNotAllowed,
    TooLarge,
    Failed,
    Unavailable,
}

impl Status {
    fn line(self) -> &'static str {
        match self {
            Status::Ok => "200 OK",
            Status::BadRequest => "400 Bad Request",
            Status::Forbidden => "403 Forbidden",
            Status::NotFound => "404 Not Found",
            Status::MethodNotAllowed => "405 Method Not Allowed",
            Status::TooLarge => "431 Request Header Fields Too Large",
            Status::Failed => "500 Internal Server Error",
            Status::Unavailable => "503 Service Unavailable",
        }
    }
}

impl Request {
    /// Parses the head of a request. Returns `None` if more of it has to arrive.
    ///
    /// # Errors
    /// Returns the status to reply with if it is no request.
    pub fn parse(head: &[u8]) -> Result<Option<Self>, Status> {
        let mut fields = [httparse::EMPTY_HEADER; MAX_FIELDS];
        let mut parsed = httparse::Request::new(&mut fields);
        match parsed.parse(head) {
            Ok(httparse::Status::Partial) => return Ok(None),
            Ok(httparse::Status::Complete(_)) => {}
            Err(httparse::Error::TooManyHeaders) => return Err(Status::TooLarge),
            Err(_) => return Err(Status::BadRequest),
        }
        let method = match parsed.method {
            Some("GET") => Method::Get,
            Some("HEAD") => Method::Head,
            Some("POST") => Method::Post,
            _ => Method::Other,
        };
        let target = parsed.path.unwrap_or_default();
        let hosts = parsed.headers.iter().filter(|field| field.name.eq_ignore_ascii_case("host"));
        let mut hosts: Vec<String> = hosts.map(|field| String::from_utf8_lossy(field.value).into_owned()).collect();
        // A request to a proxy has the whole address (RFC 9112, 3.2.2).
        let target = match target.strip_prefix("http://") {
            Some(address) => {
                let (host, target) = address.split_at(address.find('/').unwrap_or(address.len()));
                hosts.push(host.to_owned());
                if target.is_empty() { "/" } else { target }
            }
            None => target,
        };
        let (path, query) = target.split_once('?').unwrap_or((target, ""));
        // A list of several fields is one list (RFC 9110, 5.3).
        let accept = parsed.headers.iter().filter(|field| field.name.eq_ignore_ascii_case("accept"));
        let accept: Vec<&str> = accept.filter_map(|field| std::str::from_utf8(field.value).ok()).collect();
        let (path, query) = (path.to_owned(), query.to_owned());
        Ok(Some(Request { method, path, query, accept: accept.join(","), hosts }))
    }

    /// Returns whether each host that the request names is an address, `localhost` or the name of this machine.
    pub fn names_this_machine(&self) -> bool {
        let own = rustix::system::uname();
        let own = own.nodename().to_str().unwrap_or_default();
        self.hosts.iter().all(|host| is_address_or_own_name(host.trim(), own))
    }

    /// Returns the requested length of a profile or a report.
    ///
    /// # Errors
    /// Fails if it is no number from 1 to 300.
    pub fn seconds(&self) -> Result<u32, String> {
        let seconds = self.query.split('&').find_map(|field| field.strip_prefix("seconds="));
        let Some(seconds) = seconds else { return Ok(DEFAULT_SECONDS) };
        let seconds = seconds.parse::<u32>().ok().filter(|seconds| (1..=MAX_SECONDS).contains(seconds));
        seconds.ok_or_else(|| format!("seconds: give a number from 1 to {MAX_SECONDS}\n"))
    }
}

/// Returns whether a host, with or without a port, is an address, `localhost` or `own`. A page of another site cannot have such
/// a name.
fn is_address_or_own_name(host: &str, own: &str) -> bool {
    if host.is_empty() || host.parse::<SocketAddr>().is_ok() || host.parse::<IpAddr>().is_ok() {
        return true;
    }
    let is_port = |port: &str| port.bytes().all(|byte| byte.is_ascii_digit());
    let host = host.rsplit_once(':').filter(|(_, port)| is_port(port)).map_or(host, |(host, _)| host);
    let address = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
    if address.is_some_and(|address| address.parse::<IpAddr>().is_ok()) {
        return true;
    }
    let name = host.strip_suffix('.').unwrap_or(host).to_ascii_lowercase();
    name == "localhost" || name.ends_with(".localhost") || (!own.is_empty() && name == own.to_ascii_lowercase())
}

/// What a connection writes.
#[derive(Debug)]
pub struct Reply {
    head: Vec<u8>,
    body: Body,
    written: usize,
}

#[derive(Debug)]
enum Body {
    Own(Vec<u8>),
    /// The metrics of one interval, shared by all connections that read them.
    Metrics(Arc<Pages>, Form),
}

impl Body {
    fn bytes(&self) -> &[u8] {
        match self {
            Body::Own(bytes) => bytes,
            Body::Metrics(pages, form) => pages.in_form(*form),
        }
    }
}

impl Reply {
    fn new(status: Status, content_type: &str, body: Body) -> Self {
        let head = format!(
            "HTTP/1.1 {}\r\nContent-Type: {content_type}\r\nContent-Length: {}\r\nX-Content-Type-Options: nosniff\r\n\
             Cache-Control: no-store\r\nConnection: close\r\n\r\n",
            status.line(),
            body.bytes().len()
        );
        Reply { head: head.into_bytes(), body, written: 0 }
    }

    /// Replies with text.
    pub fn text(status: Status, text: &str) -> Self {
        Reply::new(status, "text/plain; charset=utf-8", Body::Own(text.as_bytes().to_vec()))
    }

    /// Replies that only these methods are allowed.
    pub fn not_allowed(methods: &str) -> Self {
        let reply = Reply::short(Status::MethodNotAllowed);
        let head = String::from_utf8_lossy(&reply.head).replacen("\r\n", &format!("\r\nAllow: {methods}\r\n"), 1);
        Reply { head: head.into_bytes(), ..reply }
    }

    /// Replies with a status alone.
    pub fn short(status: Status) -> Self {
        Reply::text(status, &format!("{}\n", status.line()))
    }

    /// Replies with a body of this type.
    pub fn body(content_type: &str, body: Vec<u8>) -> Self {
        Reply::new(Status::Ok, content_type, Body::Own(body))
    }

    /// Replies with metrics.
    pub fn page(content_type: &str, pages: Arc<Pages>, form: Form) -> Self {
        Reply::new(Status::Ok, content_type, Body::Metrics(pages, form))
    }

    /// Keeps the head alone, for HEAD.
    pub fn without_body(self) -> Self {
        Reply { body: Body::Own(Vec::new()), ..self }
    }

    /// Returns what is not written yet; empty at the end.
    pub fn rest(&self) -> &[u8] {
        match self.written.checked_sub(self.head.len()) {
            None => &self.head[self.written..],
            Some(of_body) => self.body.bytes().get(of_body..).unwrap_or_default(),
        }
    }

    /// Counts bytes as written.
    pub fn advance(&mut self, written: usize) {
        self.written += written;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn request_has_path_query_and_accepted_types() {
        let head =
            b"GET /debug/pprof/offcpu?seconds=3 HTTP/1.1\r\nHost: a\r\nACCEPT: text/plain\r\naccept: a/b;q=0.5\r\n\r\n";
        let request = Request::parse(head).expect("a request").expect("it is whole");
        assert_eq!((request.method, request.path.as_str()), (Method::Get, "/debug/pprof/offcpu"));
        assert_eq!((request.accept.as_str(), request.seconds()), ("text/plain,a/b;q=0.5", Ok(3)));
        assert_eq!(Request::parse(&head[..40]), Ok(None));
        assert_eq!(Request::parse(b"\x16\x03\x01\x02\x00\x01"), Err(Status::BadRequest));
        let many = "A: b\r\n".repeat(MAX_FIELDS + 1);
        assert_eq!(Request::parse(format!("GET / HTTP/1.1\r\n{many}\r\n").as_bytes()), Err(Status::TooLarge));
    }

    #[test]
    fn names_of_other_sites_are_not_this_machine() {
        let names = |head: &str| {
            let request =
                Request::parse(format!("GET {head}\r\n\r\n").as_bytes()).expect("a request").expect("it is whole");
            request.names_this_machine()
        };
        for host in
            ["127.0.0.1:9797", "127.0.0.1", "[::1]:9797", "[::1]", "localhost:9797", "LOCALHOST", "a.localhost", ""]
        {
            assert!(names(&format!("/ HTTP/1.1\r\nHost: {host}")), "{host}");
        }
        for host in
            ["a.example:9797", "127.0.0.1.example", "localhost.example", "a.example, localhost", "[::1].example"]
        {
            assert!(!names(&format!("/ HTTP/1.1\r\nHost: {host}")), "{host}");
            assert!(!names(&format!("/ HTTP/1.1\r\nHost: localhost\r\nhost: {host}")), "{host}");
        }
        assert!(names("/ HTTP/1.0"));
        assert!(!names("http://a.example/metrics HTTP/1.1\r\nHost: localhost"));
        assert!(names("http://localhost:9797/metrics HTTP/1.1\r\nHost: localhost"));
        assert!(is_address_or_own_name("web1:9797", "Web1") && !is_address_or_own_name("web2:9797", "web1"));
    }

    #[test]
    fn seconds_are_bounded() {
        for (query, seconds) in
            [("", Ok(10)), ("a=b&seconds=300", Ok(300)), ("seconds=301", Err(())), ("seconds=x", Err(()))]
        {
            let head = format!("GET /debug/report?{query} HTTP/1.1\r\n\r\n");
            let request = Request::parse(head.as_bytes()).expect("a request").expect("it is whole");
            assert_eq!(request.seconds().map_err(|_| ()), seconds, "{query}");
        }
    }

    #[test]
    fn reply_is_written_in_parts() {
        let mut reply = Reply::text(Status::Ok, "body\n");
        let mut written = Vec::new();
        while !reply.rest().is_empty() {
            let part = reply.rest().len().min(7);
            written.extend_from_slice(&reply.rest()[..part]);
            reply.advance(part);
        }
        let text = String::from_utf8(written).expect("it is text");
        assert!(text.starts_with("HTTP/1.1 200 OK\r\n") && text.ends_with("Content-Length: 5\r\nX-Content-Type-Options: nosniff\r\nCache-Control: no-store\r\nConnection: close\r\n\r\nbody\n"), "{text}");
    }

    proptest! {
        #[test]
        fn any_bytes_are_parsed_or_refused(head in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = Request::parse(&head);
        }
    }
}
