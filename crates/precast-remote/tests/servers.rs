//! Push and pull against real servers of S3 and a real registry, which `make test-remotes` installs and names.
#![allow(clippy::unwrap_used, reason = "a test that fails panics")]

mod asked;
mod server;

use std::{path::Path, process::Command, thread};

use asked::moved;
use precast_store::{
    Digest, Store, testing,
    transfer::{Event, Moved, Request},
};
use server::Server;
use tempfile::TempDir;

impl Server {
    /// Starts a registry.
    fn registry() -> Self {
        let config = "version: 0.1\n\
                      storage: {filesystem: {rootdirectory: FOLDER}, delete: {enabled: true}}\n\
                      http: {addr: \"127.0.0.1:PORT\"}\n";
        let arguments = ["serve", "FOLDER/config"];
        let ready = "GET /v2/ HTTP/1.0\r\n\r\n";
        Self::start("PRECAST_REGISTRY", &arguments, config, ready)
    }

    /// Starts `precast-remote` with the credentials of the server, and returns what it says.
    fn ask(&self, request: &Request) -> Vec<Event> {
        let endpoint = format!("http://127.0.0.1:{}", self.port);
        let variables = [
            ("AWS_ENDPOINT_URL", &*endpoint),
            ("AWS_ACCESS_KEY_ID", "test"),
            ("AWS_SECRET_ACCESS_KEY", "testtest"),
            ("AWS_REGION", "us-east-1"),
        ];
        let line = asked::line(request);
        asked::said(asked::begin(asked::program().envs(variables), &line)).0
    }

    fn push(&self, store: &Store, remote: &str) -> Moved {
        moved(&self.ask(&asked::push(store, remote)))
    }

    fn pull(&self, to: &Path, remote: &str) -> Moved {
        moved(&self.ask(&asked::pull(remote, None, to)))
    }
}

/// A store with a release whose weights are larger than a part of an upload.
fn source(name: &str) -> (TempDir, Store) {
    let (dir, store) = testing::store();
    let artifact = testing::put_artifact(&store, name);
    let program = testing::put_program(&store, "m", 1, &[artifact.id]);
    let mut release = testing::release("m", None, &[program.id]);
    let weights = testing::noise(20 << 20, name.len() as u64);
    release.weights = Some(store.objects().put_bytes(&weights).unwrap());
    store.releases().put(&release).unwrap();
    (dir, store)
}

/// A release goes there and comes back; pushers at once get numbers of their own.
fn serves(server: &Server) {
    const REMOTE: &str = "s3://models/precast";
    let (_from, from) = source("first");
    let pushed = server.push(&from, REMOTE);
    assert_eq!(
        (pushed.to, pushed.published, pushed.refuses_twice),
        (Some(1), true, Some(true))
    );
    assert!(!server.push(&from, REMOTE).published);
    let (_to, to) = testing::store();
    let pulled = server.pull(to.path(), REMOTE);
    assert_eq!((pulled.from, pulled.identity), (1, pushed.identity));
    assert_eq!(to.audit().verify().unwrap().defects, []);
    let sources = ["second", "another", "the fourth"].map(source);
    let numbers: std::collections::BTreeSet<u64> = thread::scope(|scope| {
        let pushers = sources
            .each_ref()
            .map(|(_, from)| scope.spawn(|| server.push(from, REMOTE).to.unwrap()));
        pushers.map(|one| one.join().unwrap()).into_iter().collect()
    });
    assert_eq!(numbers.len(), 3, "{numbers:?}");
    // The storage says how old files are, and what three old releases alone need goes.
    let remote = || "s3://models/precast".to_owned();
    let gc = server.ask(&Request::Gc {
        remote: remote(),
        grace: 0,
        keep: Some(1),
        apply: true,
    });
    let [Event::Collected(gc), Event::Done] = &gc[..] else {
        panic!("{gc:?}");
    };
    assert!(gc.applied && gc.releases.len() == 3, "{gc:?}");
    assert!(gc.bytes > 3 * (20 << 20) && gc.before > gc.bytes, "{gc:?}");
    let verified = server.ask(&Request::Verify { remote: remote() });
    let found = verified.iter().find_map(|event| match event {
        Event::Verified(found) => Some((found.releases, found.flaws.len())),
        _ => None,
    });
    assert_eq!(found, Some((1, 0)), "{verified:?}");
}

#[test]
#[ignore = "long: `make test-remotes`"]
fn moto() {
    serves(&Server::s3(
        "PRECAST_MOTO",
        &["-H", "127.0.0.1", "-p", "PORT"],
    ));
}

#[test]
#[ignore = "long: `make test-remotes`"]
fn seaweedfs() {
    serves(&Server::weed());
}

/// Returns the path of the file in which the registry keeps these bytes.
fn blob(server: &Server, content: &[u8]) -> std::path::PathBuf {
    let digest = Digest::of(content).hex();
    let blobs = server.folder.path().join("docker/registry/v2/blobs/sha256");
    blobs.join(&digest[..2]).join(&digest).join("data")
}

#[test]
#[ignore = "long: `make test-remotes`"]
fn registry() {
    let server = Server::registry();
    let host = format!("127.0.0.1:{}", server.port);
    let remote = format!("oci://{host}/models/precast");
    let (_from, from) = source("first");
    let pushed = server.push(&from, &remote);
    assert_eq!(
        (pushed.to, pushed.published, pushed.refuses_twice),
        (Some(1), true, Some(false))
    );
    let again = server.push(&from, &remote);
    assert_eq!((again.published, again.plan.moves), (false, 0));
    // The files of the store, byte for byte.
    let release = from.releases().get("m", None).unwrap().unwrap();
    let parts = from.releases().listing(&release).unwrap().parts;
    for part in &parts {
        let content = std::fs::read(from.path().join(part.path())).unwrap();
        assert!(blob(&server, &content).is_file(), "{}", part.path());
    }
    let comes = |remote: &str| {
        let (_to, to) = testing::store();
        let pulled = server.pull(to.path(), remote);
        assert_eq!((pulled.from, pulled.identity), (1, pushed.identity));
        assert_eq!(to.audit().verify().unwrap().defects, []);
    };
    comes(&remote);
    // A copy under another name and another tag.
    let copy = |arguments: &[&str], to: &str| {
        let mut skopeo = Command::new(server::program("PRECAST_SKOPEO"));
        skopeo.args(["copy", "--src-tls-verify=false", "--dest-tls-verify=false"]);
        skopeo.args(arguments);
        skopeo.arg(format!("docker://{host}/models/precast:m-r1"));
        let copied = skopeo
            .arg(format!("docker://{host}/{to}"))
            .output()
            .unwrap();
        assert!(copied.status.success(), "{copied:?}");
        comes(&format!("oci://{host}/{to}"));
    };
    copy(&["--all"], "copies/all:prod");
    copy(&[], "copies/one:m-r1");
    comes(&format!("oci://{host}/copies/one"));
    let code = r#"
import sys, oras.client
host, source, target = sys.argv[1:]
client = oras.client.OrasClient(insecure=True)
types = ["application/vnd.oci.image.index.v1+json", "application/vnd.oci.image.manifest.v1+json"]
def copy(reference):
    url = f"http://{host}/v2/{source}/manifests/{reference}"
    answer = client.do_request(url, headers={"Accept": ", ".join(types)})
    document = answer.json()
    for entry in document.get("manifests", []):
        copy(entry["digest"])
    container = client.get_container(f"{host}/{source}")
    for entry in document.get("layers", []) + [one for one in [document.get("config")] if one]:
        content = client.get_blob(container, entry["digest"]).content
        open("blob", "wb").write(content)
        client.upload_blob("blob", client.get_container(f"{host}/{target}"), entry)
    to = "latest" if reference == "m-r1" else reference
    put = f"http://{host}/v2/{target}/manifests/{to}"
    headers = {"Content-Type": document["mediaType"]}
    client.do_request(put, "PUT", headers=headers, data=answer.content).raise_for_status()
copy("m-r1")
index = client.get_manifest(client.get_container(f"{host}/{source}:m-r1"), allowed_media_type=types[:1])
client.pull(f"{host}/{source}@{index['manifests'][0]['digest']}", outdir="pulled")
"#;
    let work = tempfile::tempdir().unwrap();
    let copied = Command::new(server::program("PRECAST_ORAS_PYTHON"))
        .args(["-c", code, &host, "models/precast", "copies/oras"])
        .current_dir(work.path())
        .output()
        .unwrap();
    assert!(copied.status.success(), "{copied:?}");
    comes(&format!("oci://{host}/copies/oras:latest"));
    for part in &parts {
        let [own, pulled] = [from.path(), &work.path().join("pulled")]
            .map(|folder| std::fs::read(folder.join(part.path())).unwrap());
        assert_eq!(own, pulled, "{}", part.path());
    }
}

#[test]
#[ignore = "long: `make test-remotes`"]
fn a_tag_of_a_registry_follows_pushes() {
    let server = Server::registry();
    let remote = format!("oci://127.0.0.1:{}/models", server.port);
    let tagged = format!("{remote}:prod");
    let (_first, first) = source("first");
    let (_second, second) = source("the second");
    assert_eq!(server.push(&first, &tagged).to, Some(1));
    let pushed = server.push(&second, &remote);
    assert_eq!((pushed.to, pushed.refuses_twice), (Some(2), None));
    let number = |remote: &str| {
        let (_to, to) = testing::store();
        server.pull(to.path(), remote).from
    };
    assert_eq!((number(&remote), number(&tagged)), (2, 1));
    // Nothing is new but what the tag names.
    assert!(!server.push(&second, &tagged).published);
    assert_eq!(number(&tagged), 2);
}
