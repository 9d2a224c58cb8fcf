# The root passes everything through and adds nothing of its own but the provider.

mock_provider "oci" {
  mock_data "oci_core_images" {
    defaults = { images = [{ id = "ocid1.image.oc1..GPU" }] }
  }
}

variables {
  name = "t"
  zone = "abcD:US-CHICAGO-1-AD-1"
  pools = {
    decode  = { role = "decode", shape = "BM.GPU.B200.8", count = 2, reservation = "b200" }
    prefill = { role = "prefill", shape = "BM.GPU.H200.8", reservation = "h200" }
    router  = { role = "router", shape = "VM.Standard.E5.Flex", also = ["ingress"] }
  }
  reservations = {
    b200 = { id = "ocid1.capacityreservation.oc1..b", zone = "abcD:US-CHICAGO-1-AD-1", shape = "BM.GPU.B200.8", count = 2 }
    h200 = { id = "ocid1.capacityreservation.oc1..h", zone = "abcD:US-CHICAGO-1-AD-1", shape = "BM.GPU.H200.8", count = 1 }
  }
  transport       = { library = "nixl", protocol = "UCX" }
  ssh_keys        = ["ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIGV4YW1wbGVleGFtcGxlZXhhbXBsZWV4YW1wbGVleA ops"]
  allowed_clients = ["198.51.100.0/24"]
  admin_clients   = ["203.0.113.7/32"]
  image           = { gpu = "ocid1.image.oc1..GPU", cpu = "ocid1.image.oc1..CPU" }
  compartment_id  = "ocid1.compartment.oc1..c"
}

run "outputs_are_the_modules" {
  command = apply
  assert {
    condition     = jsonencode(keys(output.nodes)) == jsonencode(["t-decode-1", "t-decode-2", "t-prefill-1", "t-router-1"]) && jsonencode(keys(output.inventory)) == jsonencode(["decode", "ingress", "native", "observability", "prefill", "router"])
    error_message = jsonencode(output.nodes)
  }
  assert {
    condition     = length(output.ingress_addresses) == 1 && output.hourly_cost.known > 0
    error_message = jsonencode(output.hourly_cost)
  }
}

run "zone_is_a_region" {
  command = plan
  variables {
    zone = "us-chicago-1"
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
