# The root passes everything through and adds nothing of its own but the provider.

mock_provider "google" {
  mock_data "google_compute_machine_types" {
    defaults = { machine_types = [{ guest_cpus = 224 }] }
  }
}

variables {
  name = "t"
  zone = "us-central1-b"
  pools = {
    decode  = { role = "decode", shape = "a4-highgpu-8g", count = 2, reservation = "b200" }
    prefill = { role = "prefill", shape = "a3-ultragpu-8g", reservation = "h200" }
    router  = { role = "router", shape = "c4-standard-16", also = ["ingress"] }
  }
  reservations = {
    b200 = { id = "b200", zone = "us-central1-b", shape = "a4-highgpu-8g", count = 2 }
    h200 = { id = "projects/shared/reservations/h200", zone = "us-central1-b", shape = "a3-ultragpu-8g", count = 1 }
  }
  transport       = { library = "mooncake", protocol = "rdma" }
  ssh_keys        = ["ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIGV4YW1wbGVleGFtcGxlZXhhbXBsZWV4YW1wbGVleA ops"]
  allowed_clients = ["198.51.100.0/24"]
  admin_clients   = ["203.0.113.7/32"]
  image           = { gpu = "my-project/gpu", cpu = "ubuntu-os-cloud/ubuntu-2404-lts-amd64" }
  project         = "my-project"
}

run "outputs_are_the_modules" {
  command = apply
  assert {
    condition     = jsonencode(keys(output.nodes)) == jsonencode(["t-decode-1", "t-decode-2", "t-prefill-1", "t-router-1"]) && jsonencode(keys(output.inventory)) == jsonencode(["decode", "ingress", "native", "observability", "prefill", "router"])
    error_message = jsonencode(output.nodes)
  }
  assert {
    condition     = length(output.ingress_addresses) == 1 && output.hourly_cost.known == 0
    error_message = jsonencode(output.hourly_cost)
  }
}

run "zone_is_a_region" {
  command = plan
  variables {
    zone = "us-central1"
  }
  expect_failures = [var.zone]
}

run "nobody_can_call" {
  command = plan
  variables {
    allowed_clients = []
  }
  expect_failures = [var.allowed_clients]
}
